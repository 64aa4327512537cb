// A CUDA driver that loads and runs nothing: it writes down which launches it was asked for. With
// it Triton's own launchers run on a machine without a GPU (see stub_driver.py).

#include <cuda.h>
#include <stdint.h>
#include <string.h>

#define MOST_ARGS 64

typedef struct {
  unsigned grid[3];
  uint64_t function;
  uint64_t args[MOST_ARGS];
} Launch;

static Launch last;
static unsigned count, num_args;
static unsigned sizes[MOST_ARGS];
static uintptr_t handles = 1;

// Arguments arrive as addresses of values without sizes: whoever wants to see them says those first.
void stub_sizes(unsigned n, const unsigned *bytes) {
  num_args = n;
  memcpy(sizes, bytes, n * sizeof(unsigned));
}

unsigned stub_count(void) { return count; }

const Launch *stub_last(void) { return &last; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  count++;
  last.grid[0] = config->gridDimX;
  last.grid[1] = config->gridDimY;
  last.grid[2] = config->gridDimZ;
  last.function = (uint64_t)(uintptr_t)f;
  memset(last.args, 0, sizeof(last.args));
  for (unsigned i = 0; i < num_args; i++)
    memcpy(&last.args[i], params[i], sizes[i]);
  return CUDA_SUCCESS;
}

// What an H200 answers, as far as Triton asks.
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = 232448;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = 233472;
    break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = 132;
    break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = 9;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = 0;
    break;
  default:
    *value = 65536;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)(handles++);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof(*map));
  memcpy(map, &address, sizeof(address));
  return CUDA_SUCCESS;
}

#define NOTHING(name, ...)                                                                         \
  CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

NOTHING(cuInit, unsigned flags)
NOTHING(cuCtxGetDevice, CUdevice *device)
NOTHING(cuCtxGetLimit, size_t *value, CUlimit limit)
NOTHING(cuCtxSetCurrent, CUcontext context)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
NOTHING(cuDeviceGetName, char *name, int length, CUdevice device)
NOTHING(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
NOTHING(cuFuncSetAttribute, CUfunction f, CUfunction_attribute attribute, int value)
NOTHING(cuFuncSetCacheConfig, CUfunction f, CUfunc_cache config)
NOTHING(cuModuleLoadData, CUmodule *module, const void *image)
NOTHING(cuModuleUnload, CUmodule module)
NOTHING(cuOccupancyMaxActiveClusters, int *clusters, CUfunction f, const CUlaunchConfig *config)
NOTHING(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *number) {
  *number = 1;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the stub's";
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *names, void **data, CUdeviceptr p) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
