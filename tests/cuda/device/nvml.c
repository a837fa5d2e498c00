// A stand-in for NVML, through which vLLM looks for GPUs: one H100.
#include <string.h>

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.00", size); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
const char *nvmlErrorString(int error) { return "stand-in"; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = 0; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) { strncpy(text, "NVIDIA H100 80GB HBM3", size); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    strncpy(text, "GPU-00000000-0000-0000-0000-000000000000", size);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    memory->total = memory->free = 80ull << 30;
    memory->used = 0;
    return 0;
}
