// A stand-in for libcuda. Without NULL_DEVICE in the environment it says that there is no device; with it, calls succeed
// and do nothing. build.py adds the other functions of cuda.h, which call `answer`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static int answer(void) { return getenv("NULL_DEVICE") ? 0 : 100; }  // CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE

int cuInit(unsigned flags) { return answer(); }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = getenv("NULL_DEVICE") ? 1 : 0; return answer(); }
int cuDeviceGet(int *device, int number) { *device = number; return answer(); }
// Triton asks here what fits an H100: attributes of CUdevice_attribute, by number.
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 1: *value = 1024; break;         // threads of a block
        case 8: *value = 48 << 10; break;     // shared memory of a block
        case 10: *value = 32; break;          // threads of a warp
        case 12: *value = 65536; break;       // registers of a block
        case 16: *value = 132; break;         // multiprocessors
        case 75: *value = 9; break;           // compute capability
        case 97: *value = 227 << 10; break;   // shared memory of a block that asks for it
        default: *value = 0;
    }
    return answer();
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : 0;  // threads of a block
    return answer();
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = getenv("NULL_DEVICE") != NULL;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)8; return answer(); }
int cuCtxGetCurrent(void **context) { *context = (void *)8; return answer(); }
int cuCtxSetCurrent(void *context) { return answer(); }
int cuGetErrorString(int error, const char **text) { *text = "stand-in driver: no device"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "STAND_IN"; return 0; }

static int look_up(const char *name, void **function) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? 0 : 500;  // CUDA_ERROR_NOT_FOUND
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) { return look_up(name, function); }
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    int result = look_up(name, function);
    if (status) *status = result ? 1 : 0;
    return result;
}
