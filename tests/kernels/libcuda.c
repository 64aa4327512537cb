/* A libcuda.so.1 for tests without a GPU, to be loaded by triton's own driver (stub_driver.py).
 *
 * It computes nothing. It checks launches and tensor maps by the rules of the CUDA Driver API, and
 * records launches with the bytes of their parameters. A module's image is not machine code, but the
 * sizes of its kernel's parameters, as decimal numbers.
 */
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_KERNELS = 1024, MAX_PARAMS = 128, MAX_PARAM_BYTES = 4096, MAX_LAUNCHES = 4096 };

/* An H100: cuDeviceGetAttribute. */
enum { SHARED_OPTIN = 232448, SHARED_OF_SM = 233472, SHARED_BY_DEFAULT = 49152 };

typedef struct {
  char name[256];
  int num_params;
  size_t sizes[MAX_PARAMS];
  unsigned max_shared;
} Kernel;

/* stub_driver.Record has the same fields. */
typedef struct {
  const char *kernel;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  unsigned num_attributes;
  unsigned long long stream;
  size_t num_bytes;
  unsigned char params[MAX_PARAM_BYTES];
} Record;

static Kernel kernels[MAX_KERNELS];
static int num_kernels = 0;
static Record records[MAX_LAUNCHES];
static int num_launches = 0;
static int num_maps = 0;
static char reason[512] = "unknown error";

/* Names the broken rule in the error that triton raises. */
static CUresult refuse(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(reason, sizeof reason, format, values);
  va_end(values);
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_SUCCESS ? "no error" : reason;
  return CUDA_SUCCESS;
}

/* What tests read. */

int stub_num_launches(void) { return num_launches; }
int stub_num_maps(void) { return num_maps; }
const Record *stub_launch(int number) { return &records[number]; }
void stub_forget(void) { num_launches = num_maps = 0; }

/* Device and context. */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = SHARED_OPTIN;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = SHARED_OF_SM;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    *value = 65536;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = 132;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = 9;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = 0;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
    *value = 1; /* triton asks for them, and does not use them to load and launch */
    return CUDA_SUCCESS;
  default:
    return refuse("the stub does not know the device attribute %d", (int)attribute);
  }
}

static CUcontext the_context(void) { return (CUcontext)records; }

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = the_context();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = the_context();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

/* Tensors are in this process' memory. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return refuse("the stub does not know the pointer attribute %d", (int)attribute);
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

/* Kernels: a handle is the number of a kernel, from 1. */

static Kernel *kernel_of(CUfunction function) {
  size_t number = (size_t)function;
  return number >= 1 && number <= (size_t)num_kernels ? &kernels[number - 1] : NULL;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (num_kernels == MAX_KERNELS)
    return refuse("the stub takes at most %d kernels", MAX_KERNELS);
  Kernel *kernel = &kernels[num_kernels];
  const char *text = image;
  for (char *end; *text; text = end) {
    long size = strtol(text, &end, 10);
    if (end == text || size < 1 || kernel->num_params == MAX_PARAMS)
      return refuse("not the sizes of at most %d parameters: %.100s", MAX_PARAMS, text);
    kernel->sizes[kernel->num_params++] = (size_t)size;
  }
  kernel->max_shared = SHARED_BY_DEFAULT;
  *module = (CUmodule)(size_t)++num_kernels;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Kernel *kernel = kernel_of((CUfunction)module);
  if (kernel == NULL)
    return refuse("unknown module");
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Kernel *kernel = kernel_of(function);
  if (kernel == NULL)
    return refuse("unknown function");
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value < 0 || value > SHARED_OPTIN)
      return refuse("%d bytes of shared memory, the device has %d", value, SHARED_OPTIN);
    kernel->max_shared = (unsigned)value;
    return CUDA_SUCCESS;
  }
  /* Such as triton 3.9's mode of shared memory, which only later drivers know. */
  return attribute < CU_FUNC_ATTRIBUTE_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *num, CUfunction function, const CUlaunchConfig *config) {
  *num = 1;
  return CUDA_SUCCESS;
}

/* cuLaunchKernelEx, and the limits of compute capability 9.0. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                          void **extra) {
  Kernel *kernel = kernel_of(function);
  if (kernel == NULL)
    return refuse("unknown function");
  if (num_launches == MAX_LAUNCHES)
    return refuse("the stub records at most %d launches", MAX_LAUNCHES);
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ)
    return refuse("an empty grid");
  if (config->gridDimX > 0x7fffffff || config->gridDimY > 65535 || config->gridDimZ > 65535)
    return refuse("a grid of %u x %u x %u", config->gridDimX, config->gridDimY, config->gridDimZ);
  if ((size_t)config->blockDimX * config->blockDimY * config->blockDimZ > 1024)
    return refuse("more than 1024 threads");
  if (config->sharedMemBytes > kernel->max_shared)
    return refuse("%u bytes of shared memory, %u were asked for", config->sharedMemBytes,
                  kernel->max_shared);
  Record *record = &records[num_launches];
  *record = (Record){
      .kernel = kernel->name,
      .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
      .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
      .shared_bytes = config->sharedMemBytes,
      .num_attributes = config->numAttrs,
      .stream = (unsigned long long)config->hStream,
  };
  for (int i = 0; i < kernel->num_params; i++) {
    if (record->num_bytes + kernel->sizes[i] > MAX_PARAM_BYTES)
      return refuse("more than %d bytes of parameters", MAX_PARAM_BYTES);
    memcpy(record->params + record->num_bytes, params[i], kernel->sizes[i]);
    record->num_bytes += kernel->sizes[i];
  }
  num_launches++;
  return CUDA_SUCCESS;
}

/* cuTensorMapEncodeTiled. */

static size_t size_of(CUtensorMapDataType type) {
  switch (type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8:
    return 1;
  case CU_TENSOR_MAP_DATA_TYPE_UINT16:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
    return 2;
  case CU_TENSOR_MAP_DATA_TYPE_UINT32:
  case CU_TENSOR_MAP_DATA_TYPE_INT32:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    return 4;
  default:
    return 0;
  }
}

/* Bytes of a swizzled row; 0 for no swizzling. */
static size_t width_of(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
  case CU_TENSOR_MAP_SWIZZLE_32B:
    return 32;
  case CU_TENSOR_MAP_SWIZZLE_64B:
    return 64;
  case CU_TENSOR_MAP_SWIZZLE_128B:
    return 128;
  default:
    return 0;
  }
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  num_maps++;
  size_t size = size_of(type), width = width_of(swizzle);
  if ((size_t)map % 64)
    return refuse("a tensor map's address is no multiple of 64");
  if (!size || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE)
    return refuse("the stub does not know the type %d or interleave %d", (int)type, (int)interleave);
  if (rank < 1 || rank > 5)
    return refuse("a tensor of %u dims", rank);
  if ((size_t)address % 16)
    return refuse("the tensor's address %p is no multiple of 16", address);
  for (unsigned i = 0; i < rank; i++) {
    if (dims[i] < 1 || dims[i] > 1ull << 32)
      return refuse("size %llu of dim %u", (unsigned long long)dims[i], i);
    if (box[i] < 1 || box[i] > 256)
      return refuse("size %u of the box in dim %u", box[i], i);
    if (element_strides[i] < 1 || element_strides[i] > 8)
      return refuse("element stride %u of dim %u", element_strides[i], i);
  }
  for (unsigned i = 0; i + 1 < rank; i++)
    if (strides[i] % 16 || strides[i] >= 1ull << 40)
      return refuse("stride of %llu bytes of dim %u", (unsigned long long)strides[i], i + 1);
  if (box[0] * size % 16 || (width && box[0] * size > width))
    return refuse("rows of %zu bytes in the box, swizzled in %zu bytes", box[0] * size, width);
  /* Not the device's format: fields that tests read. */
  memset(map, 0, sizeof *map);
  cuuint64_t *fields = map->opaque;
  fields[0] = (cuuint64_t)address;
  fields[1] = rank;
  for (unsigned i = 0; i < rank; i++) {
    fields[2 + i] = dims[i];
    fields[7 + i] = i ? strides[i - 1] : size;
    fields[12] |= (cuuint64_t)(box[i] - 1) << 8 * i;
  }
  fields[13] = width;
  fields[14] = type;
  fields[15] = fill;
  return CUDA_SUCCESS;
}
