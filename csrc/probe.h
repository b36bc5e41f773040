/* probe.h - what the parts of the probe share; what they measure is declared in moestream.h. */
#ifndef MS_PROBE_H
#define MS_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Memory, given back by munmap; NULL: there is none. huge: in huge pages, as slots of experts are, for with small ones address
 * translation takes time too; else in what the system gives to all. *bytes is rounded up to whole huge pages. */
uint8_t *ms_probe_map(size_t *bytes, bool huge);

#endif
