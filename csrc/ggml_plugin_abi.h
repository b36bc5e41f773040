/* ggml_plugin_abi.h - the tables a ggml device fills in.
 *
 * ggml installs the functions that use a device but not the structs that make
 * one. These are those structs as ggml's backend API version 2 lays them out;
 * the names of the members are ours. A different layout would make ggml jump
 * through the wrong pointer, so ms_abi_check() compares them with the running
 * library before anything is registered, and the Python package pins the
 * version of llama-cpp-python that carries it.
 *
 * Only what a host-memory device needs is typed in full; slots that stay NULL
 * are `ms_abi_unused`.
 */
#ifndef MS_GGML_PLUGIN_ABI_H
#define MS_GGML_PLUGIN_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"

#define MS_GGML_BACKEND_API_VERSION 2

typedef void (*ms_abi_unused)(void);

struct ms_buft_iface {
    const char *(*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size_bytes);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const struct ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    struct ms_buft_iface iface;
    ggml_backend_dev_t device;
    void *context;
};

struct ms_buffer_iface {
    void (*free_buffer)(ggml_backend_buffer_t);
    void *(*get_base)(ggml_backend_buffer_t);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t, struct ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, const void *data, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, void *data, size_t offset, size_t size);
    ms_abi_unused set_tensor_2d;
    ms_abi_unused get_tensor_2d;
    bool (*cpy_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *src, struct ggml_tensor *dst);
    void (*clear)(ggml_backend_buffer_t, uint8_t value);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    struct ms_buffer_iface iface;
    ggml_backend_buffer_type_t buft;
    void *context;
    size_t size;
    enum ggml_backend_buffer_usage usage;
};

struct ms_backend_iface {
    const char *(*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    ms_abi_unused set_tensor_async;
    ms_abi_unused get_tensor_async;
    ms_abi_unused set_tensor_2d_async;
    ms_abi_unused get_tensor_2d_async;
    ms_abi_unused cpy_tensor_async;
    ms_abi_unused synchronize;
    ms_abi_unused graph_plan_create;
    ms_abi_unused graph_plan_free;
    ms_abi_unused graph_plan_update;
    ms_abi_unused graph_plan_compute;
    enum ggml_status (*graph_compute)(ggml_backend_t, struct ggml_cgraph *);
    ms_abi_unused event_record;
    ms_abi_unused event_wait;
    ms_abi_unused graph_optimize;
};

struct ggml_backend {
    ggml_guid_t guid;
    struct ms_backend_iface iface;
    ggml_backend_dev_t device;
    void *context;
};

struct ms_device_iface {
    const char *(*get_name)(ggml_backend_dev_t);
    const char *(*get_description)(ggml_backend_dev_t);
    void (*get_memory)(ggml_backend_dev_t, size_t *free_bytes, size_t *total_bytes);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void (*get_props)(ggml_backend_dev_t, struct ggml_backend_dev_props *);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char *params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t, void *, size_t size, size_t max_tensor_size);
    bool (*supports_op)(ggml_backend_dev_t, const struct ggml_tensor *);
    bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    bool (*offload_op)(ggml_backend_dev_t, const struct ggml_tensor *);
    ms_abi_unused event_new;
    ms_abi_unused event_free;
    ms_abi_unused event_synchronize;
};

struct ggml_backend_device {
    struct ms_device_iface iface;
    ggml_backend_reg_t reg;
    void *context;
};

struct ms_reg_iface {
    const char *(*get_name)(ggml_backend_reg_t);
    size_t (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t index);
    void *(*get_proc_address)(ggml_backend_reg_t, const char *name);
};

struct ggml_backend_reg {
    int api_version;
    struct ms_reg_iface iface;
    void *context;
};

/* Exported by ggml-base, declared in no installed header. */
extern ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t buft, struct ms_buffer_iface iface,
                                                      void *context, size_t size);

#endif
