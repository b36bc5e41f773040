#include "message.h"

#include <stdarg.h>
#include <stdio.h>

int ms_fail(int code, char *err, size_t errlen, const char *format, ...) {
    if (err && errlen) {
        va_list args;
        va_start(args, format);
        vsnprintf(err, errlen, format, args);
        va_end(args);
    }
    return code;
}
