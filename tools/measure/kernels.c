/* One timed pass of the row kernels over many experts, by several threads, for kernels.py.
 *
 * The functions measured are given as pointers, so that this needs no library.
 * Every thread takes its share of the rows of every expert for dots and reads.
 * For sums it takes its share of the experts, or of the columns of each. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { READ, DOT, GGML_DOT, ADD, ADD_COLUMNS };
enum { MAX_THREADS = 64 };

typedef void rows_dot(int type, int64_t columns, const uint8_t *matrix, const int32_t *rows, int first, int n_rows, const uint8_t *activations,
                      size_t activation_bytes, int n_activations, float *out, size_t out_stride);
typedef void rows_add(int type, const uint8_t *matrix, int64_t columns, const int32_t *rows, const float *x, int n, int64_t begin, int64_t end,
                      float *y);
typedef void vec_dot(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);

struct pass {
    int kind, n_threads, type;
    int n_experts, n_rows; /* rows of an expert */
    int64_t columns;
    size_t row_bytes;
    const uint8_t *experts;
    const int32_t *lists; /* n_listed rows of each expert, or NULL: all */
    int n_listed;
    const uint8_t *activations;
    size_t activation_bytes;
    int n_activations;
    const float *x; /* weights of the rows listed */
    rows_dot *dot;
    rows_add *add;
    vec_dot *ggml_dot;
};

struct worker {
    const struct pass *pass;
    int number;
    pthread_t thread;
    float *out;
};

typedef uint64_t vector __attribute__((vector_size(64), aligned(1)));

static uint64_t sum_of(const uint8_t *bytes, size_t n) {
    vector sum[8] = {0}, total = {0};
    for (; n >= sizeof sum; n -= sizeof sum, bytes += sizeof sum)
        for (int i = 0; i < 8; i++) sum[i] += *(const vector *)(bytes + sizeof(vector) * (size_t)i);
    for (int i = 0; i < 8; i++) total += sum[i];
    return total[0] + total[1] + total[2] + total[3] + total[4] + total[5] + total[6] + total[7];
}

/* Of rows here and there, the rows to come asked for ahead. */
static uint64_t sum_of_listed(const uint8_t *matrix, size_t row_bytes, const int32_t *list, int n) {
    enum { AHEAD = 8 };
    vector sum = {0};
    for (int i = 0; i < n; i++) {
        const uint8_t *row = matrix + (size_t)list[i] * row_bytes, *next = matrix + (size_t)list[i + AHEAD < n ? i + AHEAD : n - 1] * row_bytes;
        for (size_t at = 0; at + sizeof sum <= row_bytes; at += sizeof sum) {
            __builtin_prefetch(next + at);
            sum += *(const vector *)(row + at);
        }
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static void one_expert(const struct worker *worker, int expert, volatile uint64_t *sink) {
    const struct pass *p = worker->pass;
    const uint8_t *matrix = p->experts + (size_t)expert * (size_t)p->n_rows * p->row_bytes;
    const int32_t *list = p->lists ? p->lists + (size_t)expert * (size_t)p->n_listed : NULL;
    int n = list ? p->n_listed : p->n_rows, first = n * worker->number / p->n_threads;
    int n_mine = n * (worker->number + 1) / p->n_threads - first;
    if (p->kind == READ && list) *sink += sum_of_listed(matrix, p->row_bytes, list + first, n_mine);
    else if (p->kind == READ) *sink += sum_of(matrix + (size_t)first * p->row_bytes, (size_t)n_mine * p->row_bytes);
    if (p->kind == DOT)
        p->dot(p->type, p->columns, matrix, list ? list + first : NULL, first, n_mine, p->activations, p->activation_bytes, p->n_activations,
               worker->out + first, (size_t)n);
    if (p->kind == GGML_DOT)
        for (int i = first; i < first + n_mine; i++)
            for (int a = 0; a < p->n_activations; a++)
                p->ggml_dot((int)p->columns, worker->out + (size_t)a * (size_t)n + i, 0, matrix + (size_t)(list ? list[i] : i) * p->row_bytes, 0,
                            p->activations + (size_t)a * p->activation_bytes, 0, 1);
    if (p->kind == ADD && expert % p->n_threads == worker->number)
        p->add(p->type, matrix, p->columns, list, p->x, n, 0, p->columns, worker->out + p->columns * worker->number);
    if (p->kind == ADD_COLUMNS) {
        int64_t blocks = p->columns / 32;
        p->add(p->type, matrix, p->columns, list, p->x, n, blocks * worker->number / p->n_threads * 32,
               blocks * (worker->number + 1) / p->n_threads * 32, worker->out);
    }
}

static void *work(void *argument) {
    const struct worker *worker = argument;
    volatile uint64_t sink = 0;
    for (int e = 0; e < worker->pass->n_experts; e++) one_expert(worker, e, &sink);
    return NULL;
}

/* Seconds of the pass, or -1. */
double run_pass(const struct pass *pass) {
    struct worker workers[MAX_THREADS];
    struct timespec begin, end;
    float *out = calloc((size_t)pass->n_activations * (size_t)pass->n_rows + (size_t)pass->columns * (size_t)pass->n_threads, sizeof(float));
    if (!out || pass->n_threads > MAX_THREADS) return -1;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < pass->n_threads; i++) {
        workers[i] = (struct worker){.pass = pass, .number = i, .out = out};
        if (i && pthread_create(&workers[i].thread, NULL, work, &workers[i])) return -1;
    }
    work(&workers[0]);
    for (int i = 1; i < pass->n_threads; i++) pthread_join(workers[i].thread, NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    free(out);
    return (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
}
