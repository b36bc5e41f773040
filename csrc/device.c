/* device.c - the ggml device that llama.cpp hands expert products to.
 *
 * It is of type ACCEL: llama.cpp creates a backend of it in every context and
 * places on it the operations whose weight is in one of its buffer types. Its
 * default buffer type is the CPU's, so activations stay in ordinary memory and
 * models that are not streamed never meet it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "ggml-cpu.h"

static struct ggml_backend_reg registration;
static struct ggml_backend_device device;

/* ------------------------------------------------------------ buffers */

struct memory {
    void *base;
    size_t bytes;
    bool reserved; /* address space for experts: neither readable nor writable */
};

static struct ms_engine *engine_of(ggml_backend_buffer_type_t buft) { return buft->context; }

static void buffer_free(ggml_backend_buffer_t buffer) {
    struct memory *memory = buffer->context;
    munmap(memory->base, memory->bytes);
    free(memory);
}

static void *buffer_base(ggml_backend_buffer_t buffer) { return ((struct memory *)buffer->context)->base; }

static enum ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor) {
    struct ms_engine *engine = engine_of(buffer->buft);
    if (!((struct memory *)buffer->context)->reserved) { /* a norm or router, whose place is noted; or a LoRA: memory like any other */
        int kind = buffer->buft == &engine->norm_type ? MS_WEIGHT_NORM : MS_WEIGHT_ROUTER, block;
        if (buffer->buft != &engine->buffer_type && sscanf(tensor->name, "blk.%d.", &block) == 1) tensor->extra = ms_engine_hook(engine, block, kind);
        return GGML_STATUS_SUCCESS;
    }
    int matrix, layer = ms_source_find(engine->source, tensor->name, &matrix);
    if (layer < 0) return GGML_STATUS_FAILED;
    engine->wanted[layer] = true;
    tensor->extra = &engine->tensors[layer][matrix];
    return GGML_STATUS_SUCCESS;
}

static void buffer_memset(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
    if (!((struct memory *)buffer->context)->reserved) memset((uint8_t *)tensor->data + offset, value, size);
}

static void buffer_set(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    if (!((struct memory *)buffer->context)->reserved) memcpy((uint8_t *)tensor->data + offset, data, size);
}

/* Whoever asks for an expert tensor's bytes (saving the model, say) gets them from the disk. */
static void buffer_get(ggml_backend_buffer_t buffer, const struct ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    if (!((struct memory *)buffer->context)->reserved) {
        memcpy(data, (const uint8_t *)tensor->data + offset, size);
        return;
    }
    const struct ms_expert_tensor *expert = tensor->extra;
    const struct ms_source *source = expert->engine->source;
    const struct ms_matrix *matrix = &source->layers[expert->layer].matrices[expert->matrix];
    for (size_t done = 0; done < size;) {
        uint8_t *slice;
        size_t bytes, at = offset + done, within = at % tensor->nb[2];
        if (ms_expert_plain(source, matrix, (int)(at / tensor->nb[2]), &slice, &bytes) < 0) { /* no way to report it from here: the caller sees zeros, the next call the error */
            memset((uint8_t *)data + done, 0, size - done);
            return;
        }
        size_t n = bytes - within < size - done ? bytes - within : size - done;
        memcpy((uint8_t *)data + done, slice + within, n);
        free(slice);
        done += n;
    }
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    struct memory *memory = buffer->context;
    if (!memory->reserved) memset(memory->base, value, buffer->size);
}

static const char *buft_name(ggml_backend_buffer_type_t buft) {
    const struct ms_engine *engine = engine_of(buft);
    return buft == &engine->buffer_type ? engine->buffer_type_name : buft == &engine->norm_type ? engine->norm_type_name : engine->router_type_name;
}

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    struct ms_engine *engine = engine_of(buft);
    struct memory *memory = malloc(sizeof *memory);
    if (!memory) return NULL;
    *memory = (struct memory){.bytes = size ? size : 1, .reserved = engine->loading && buft == &engine->buffer_type};
    memory->base = mmap(NULL, memory->bytes, memory->reserved ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | (memory->reserved ? MAP_NORESERVE : 0), -1, 0);
    if (memory->base == MAP_FAILED) {
        free(memory);
        return NULL;
    }
    struct ms_buffer_iface iface = {
        .free_buffer = buffer_free,
        .get_base = buffer_base,
        .init_tensor = buffer_init_tensor,
        .memset_tensor = buffer_memset,
        .set_tensor = buffer_set,
        .get_tensor = buffer_get,
        .clear = buffer_clear,
    };
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t buft) {
    (void)buft;
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

/* "Host" makes the loader read straight to the tensor's address, which for
 * experts is a read of zero bytes; otherwise it would stage each in memory. */
static bool buft_is_host(ggml_backend_buffer_type_t buft) {
    (void)buft;
    return true;
}

/* ------------------------------------------------------------ which operations */

#define MOST_OPERATIONS 80 /* behind each other on what products give: one an expert chosen, and a few */

static bool is_ours(const struct ggml_tensor *tensor) {
    ggml_backend_buffer_t buffer = tensor && tensor->view_src ? tensor->view_src->buffer : tensor ? tensor->buffer : NULL;
    return buffer && buffer->iface.get_base == buffer_base;
}

static const struct ms_expert_tensor *expert_tensor(const struct ggml_tensor *weight) {
    return is_ours(weight) && ((struct memory *)weight->buffer->context)->reserved ? weight->extra : NULL;
}

/* A norm's or router's. */
static const struct ms_expert_tensor *hook_tensor(const struct ggml_tensor *weight) {
    return is_ours(weight) && weight->buffer && !((struct memory *)weight->buffer->context)->reserved && weight->buffer->buft != &engine_of(weight->buffer->buft)->buffer_type ? weight->extra : NULL;
}

/* What comes of our products: row by row made of them, weighted, added up.
 * Taking these too lets a whole block arrive as one split. */
static bool is_expert_activation(const struct ggml_tensor *tensor, int depth) {
    if (!tensor || depth > MOST_OPERATIONS) return false;
    if (tensor->view_src && tensor->op != GGML_OP_CLAMP) return is_expert_activation(tensor->view_src, depth + 1);
    switch (tensor->op) {
        case GGML_OP_MUL_MAT_ID: return is_ours(tensor->src[0]);
        case GGML_OP_GLU: return is_expert_activation(tensor->src[0], depth + 1) && (!tensor->src[1] || is_expert_activation(tensor->src[1], depth + 1));
        case GGML_OP_UNARY:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
        case GGML_OP_SCALE:
        case GGML_OP_MUL: /* of two, or by the routing weights */
        case GGML_OP_ADD_ID: return is_expert_activation(tensor->src[0], depth + 1);
        case GGML_OP_ADD: return is_expert_activation(tensor->src[1], depth + 1) && is_expert_activation(tensor->src[0], depth + 1); /* the sum over choices */
        default: return false;
    }
}

/* What ends a layer behind its experts: their sum is added to what shared experts gave, and to the state; the state is
 * normalised for the next layer. Taken too, so that the norm before a layer's attention is no split of its own. */
static bool ends_layer(const struct ggml_tensor *tensor, int deep) {
    if (tensor->op != GGML_OP_ADD || tensor->view_src) return false;
    return is_expert_activation(tensor->src[0], 0) || is_expert_activation(tensor->src[1], 0) || (deep > 0 && ends_layer(tensor->src[0], deep - 1));
}

static bool is_norm_of_state(const struct ggml_tensor *op) {
    if (op->op == GGML_OP_MUL) return is_ours(op->src[1]) && op->src[1]->buffer->buft == &engine_of(op->src[1]->buffer->buft)->norm_type;
    return (op->op == GGML_OP_RMS_NORM || op->op == GGML_OP_NORM) && ends_layer(op->src[0], 1);
}

/* Does the router come right before the experts? It does if it reads what they read, the state as normalised after
 * attention; one that reads the state before attention would be a split of its own, and is taken only if it is needed:
 * where the choice is edited, or heads make it. */
static bool is_router_product(const struct ggml_tensor *op) {
    if (op->op != GGML_OP_MUL_MAT || !is_ours(op->src[0])) return false;
    const struct ms_engine *engine = engine_of(op->src[0]->buffer->buft);
    const struct ms_expert_tensor *router = op->src[0]->buffer->buft == &engine->router_type ? op->src[0]->extra : NULL;
    if (router && ms_heads_route(engine->heads) && ms_heads_predicting(engine->heads, router->layer) >= 0) return true;
    return op->src[0]->buffer->buft == &engine->buffer_type || op->src[1]->op == GGML_OP_MUL || ms_routing_edits(engine->routing);
}

/* What is made of the router's logits: the choice of experts and their weights. It is computed here so that a layer's
 * router and experts are one split, and the time of each is known. */
static bool is_choice(const struct ggml_tensor *tensor, int depth) {
    if (!tensor || depth > MOST_OPERATIONS) return false;
    if (tensor->view_src && tensor->op != GGML_OP_CLAMP) return is_choice(tensor->view_src, depth + 1);
    switch (tensor->op) {
        case GGML_OP_MUL_MAT: return is_router_product(tensor);
        case GGML_OP_UNARY:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_ADD:
        case GGML_OP_MUL:
        case GGML_OP_SCALE:
        case GGML_OP_SQRT:
        case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K:
        case GGML_OP_GET_ROWS:
        case GGML_OP_SET_ROWS:
        case GGML_OP_FILL:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_CLAMP:
        case GGML_OP_DIV: return is_choice(tensor->src[0], depth + 1);
        default: return false;
    }
}

static bool device_supports_op(ggml_backend_dev_t dev, const struct ggml_tensor *op) {
    (void)dev;
    if (op->op == GGML_OP_MUL_MAT_ID) return is_ours(op->src[0]);
    if (op->op == GGML_OP_MUL_MAT) return is_router_product(op);
    if (op->view_src && op->op != GGML_OP_CLAMP) return false; /* ggml_clamp gives a view of what it clamps */
    return is_expert_activation(op, 0) || is_choice(op, 0) || ends_layer(op, 1) || is_norm_of_state(op);
}

static bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    (void)dev;
    return ggml_backend_buft_is_host(buft);
}

/* ------------------------------------------------------------ backend: one per context */

static const char *backend_name(ggml_backend_t backend) {
    (void)backend;
    return "moestream";
}

static void backend_free(ggml_backend_t backend) {
    ms_experts_free(backend->context);
    free(backend);
}

static struct ms_engine *engine_of_graph(struct ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        const struct ms_expert_tensor *tensor = node->op == GGML_OP_MUL_MAT_ID ? expert_tensor(node->src[0]) : NULL;
        if (!tensor && node->op == GGML_OP_MUL) tensor = hook_tensor(node->src[1]);
        if (!tensor && node->op == GGML_OP_MUL_MAT) tensor = hook_tensor(node->src[0]);
        if (tensor) return tensor->engine;
    }
    return NULL;
}

static int first_wanted_layer(const struct ms_engine *engine) {
    for (int l = 0; l < engine->source->n_layers; l++)
        if (engine->wanted[l]) return l;
    return 0;
}

static int last_wanted_layer(const struct ms_engine *engine) {
    int l = engine->source->n_layers - 1;
    while (l > 0 && !engine->wanted[l]) l--;
    return l;
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph *graph) {
    struct ms_experts *experts = backend->context;
    struct ms_engine *engine = engine_of_graph(graph);
    struct ms_experts_counters counters = {0};
    char err[MS_MESSAGE_BYTES] = "";
    enum ggml_status status = GGML_STATUS_FAILED;
    if (!engine) return ms_experts_compute(experts, NULL, graph, &counters, NULL, err, sizeof err);
    if (!engine->store) {
        ms_fail(0, err, sizeof err, "%s: decoded before its expert cache was given memory (ms_engine_start)", engine->source->files[0].path);
    } else {
        struct ms_experts_model model = {.source = engine->source, .store = engine->store, .products = engine->products, .first_layer = first_wanted_layer(engine), .last_layer = last_wanted_layer(engine),
                                         .prerouter = &engine->prerouter, .routing = engine->routing, .heads = engine->heads, .timeline = engine->timeline};
        status = ms_experts_compute(experts, &model, graph, &counters, engine->zeros, err, sizeof err);
    }
    ms_engine_add(engine, &counters, err);
    return status;
}

static void backend_set_threads(ggml_backend_t backend, int n_threads) { ms_experts_set_threads(backend->context, n_threads); }

static void backend_set_abort(ggml_backend_t backend, ggml_abort_callback callback, void *data) {
    ms_experts_set_abort(backend->context, callback, data);
}

/* ------------------------------------------------------------ device and registration */

static const char *device_name(ggml_backend_dev_t dev) {
    (void)dev;
    return "moestream";
}

static const char *device_description(ggml_backend_dev_t dev) {
    (void)dev;
    return "experts streamed from disk";
}

static void device_memory(ggml_backend_dev_t dev, size_t *free_bytes, size_t *total_bytes) {
    (void)dev;
    *free_bytes = *total_bytes = 0; /* none of its own to report */
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t dev) {
    (void)dev;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void device_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props *props) {
    memset(props, 0, sizeof *props);
    props->name = device_name(dev);
    props->description = device_description(dev);
    props->type = device_type(dev);
}

static ggml_backend_t device_backend(ggml_backend_dev_t dev, const char *params) {
    (void)params;
    static ggml_guid guid = {'m', 'o', 'e', 's', 't', 'r', 'e', 'a', 'm', 0, 0, 0, 0, 0, 0, 1};
    struct ggml_backend *backend = calloc(1, sizeof *backend);
    struct ms_experts *experts = ms_experts_new(expert_tensor, hook_tensor);
    if (!backend || !experts) {
        free(backend);
        ms_experts_free(experts);
        return NULL;
    }
    backend->guid = &guid;
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = backend_graph_compute;
    backend->device = dev;
    backend->context = experts;
    return backend;
}

static ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t dev) {
    (void)dev;
    return ggml_backend_cpu_buffer_type();
}

static const char *reg_name(ggml_backend_reg_t reg) {
    (void)reg;
    return "moestream";
}

static size_t reg_device_count(ggml_backend_reg_t reg) {
    (void)reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index) {
    (void)reg;
    (void)index;
    return &device;
}

static void *reg_proc_address(ggml_backend_reg_t reg, const char *name) {
    (void)reg;
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) return (void *)backend_set_threads;
    if (strcmp(name, "ggml_backend_set_abort_callback") == 0) return (void *)backend_set_abort;
    return NULL;
}

static void register_device(void) {
    device.iface = (struct ms_device_iface){
        .get_name = device_name,
        .get_description = device_description,
        .get_memory = device_memory,
        .get_type = device_type,
        .get_props = device_props,
        .init_backend = device_backend,
        .get_buffer_type = device_buft,
        .supports_op = device_supports_op,
        .supports_buft = device_supports_buft,
    };
    device.reg = &registration;
    registration.api_version = MS_GGML_BACKEND_API_VERSION;
    registration.iface = (struct ms_reg_iface){
        .get_name = reg_name,
        .get_device_count = reg_device_count,
        .get_device = reg_device,
        .get_proc_address = reg_proc_address,
    };
    ggml_backend_register(&registration);
}

void ms_device_attach(struct ms_engine *engine) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static int n_engines;
    pthread_once(&once, register_device);
    snprintf(engine->buffer_type_name, sizeof engine->buffer_type_name, "moestream-%d", __atomic_add_fetch(&n_engines, 1, __ATOMIC_RELAXED));
    snprintf(engine->router_type_name, sizeof engine->router_type_name, "%.20s-router", engine->buffer_type_name);
    snprintf(engine->norm_type_name, sizeof engine->norm_type_name, "%.20s-norm", engine->buffer_type_name);
    engine->norm_type = engine->router_type = engine->buffer_type = (struct ggml_backend_buffer_type){
        .iface = {.get_name = buft_name, .alloc_buffer = buft_alloc, .get_alignment = buft_alignment, .is_host = buft_is_host},
        .device = &device,
        .context = engine,
    };
}

/* ------------------------------------------------------------ are our structs ggml's? */

#define DIFFERS(what) return ms_fail(-EPROTO, err, errlen, "the plug-in interface of the installed llama-cpp-python differs (%s)", what)

int ms_abi_check(char *err, size_t errlen) {
    ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type();
    if (buft->device != ggml_backend_buft_get_device(buft)) DIFFERS("buffer type: device"); /* NULL in this version */
    if (strcmp(buft->iface.get_name(buft), ggml_backend_buft_name(buft)) != 0) DIFFERS("buffer type: name");
    if (buft->iface.get_alignment(buft) != ggml_backend_buft_get_alignment(buft)) DIFFERS("buffer type: alignment");
    if (!buft->iface.is_host || !buft->iface.is_host(buft)) DIFFERS("buffer type: host");
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!dev) return ms_fail(-ENODEV, err, errlen, "the installed llama-cpp-python has no CPU backend");
    if (dev->reg != ggml_backend_dev_backend_reg(dev)) DIFFERS("device: registration");
    if (strcmp(dev->iface.get_name(dev), ggml_backend_dev_name(dev)) != 0) DIFFERS("device: name");
    if (dev->iface.get_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) DIFFERS("device: type");
    if (!dev->iface.supports_buft(dev, buft)) DIFFERS("device: buffer types");
    if (dev->reg->api_version != MS_GGML_BACKEND_API_VERSION) DIFFERS("backend API version");
    if (dev->reg->iface.get_device_count(dev->reg) != ggml_backend_reg_dev_count(dev->reg)) DIFFERS("registration: devices");
    if (dev->reg->iface.get_device(dev->reg, 0) != dev) DIFFERS("registration: device");
    if (dev->reg->iface.get_proc_address(dev->reg, "ggml_backend_set_n_threads") != ggml_backend_reg_get_proc_address(dev->reg, "ggml_backend_set_n_threads"))
        DIFFERS("registration: functions");
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(buft, 64);
    if (!buffer) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    bool same = buffer->buft == buft && buffer->size == ggml_backend_buffer_get_size(buffer) && buffer->usage == ggml_backend_buffer_get_usage(buffer) &&
                buffer->iface.get_base(buffer) == ggml_backend_buffer_get_base(buffer);
    ggml_backend_buffer_free(buffer);
    if (!same) DIFFERS("buffer");
    ggml_backend_t backend = ggml_backend_cpu_init();
    if (!backend) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    same = backend->device == ggml_backend_get_device(backend) && backend->guid == ggml_backend_guid(backend) &&
           strcmp(backend->iface.get_name(backend), ggml_backend_name(backend)) == 0 && backend->iface.graph_compute != NULL;
    ggml_backend_free(backend);
    if (!same) DIFFERS("backend");
    return 0;
}
