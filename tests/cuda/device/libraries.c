// Stand-ins for the functions of cuBLAS and NVRTC that return something besides success; preloaded, as runtime.cpp is.
#include <stdlib.h>
#include <string.h>

static int handle(void **made) { *made = calloc(1, 256); return 0; }

int cublasCreate_v2(void **made) { return handle(made); }
int cublasGetVersion_v2(void *library, int *version) { *version = 130101; return 0; }
int cublasGetProperty(int which, int *value) { *value = which == 0 ? 13 : 1; return 0; }
int cublasGetMathMode(void *library, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *library, int *mode) { *mode = 0; return 0; }

int cublasLtCreate(void **made) { return handle(made); }
size_t cublasLtGetVersion(void) { return 130101; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return handle(made); }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long rows, unsigned long columns, long leading) {
    return handle(made);
}
int cublasLtMatmulPreferenceCreate(void **made) { return handle(made); }
// One algorithm is found, and needs no workspace.
int cublasLtMatmulAlgoGetHeuristic(void *library, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 96);
    *found = 1;
    return 0;
}

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int *number) { *number = 1; return 0; }
int nvrtcGetSupportedArchs(int *architectures) { *architectures = 90; return 0; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    return handle(program);
}
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = "kernel"; return 0; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { *bytes = 16; return 0; }
int nvrtcGetCUBIN(void *program, char *code) { memset(code, 0, 16); return 0; }
int nvrtcGetPTXSize(void *program, size_t *bytes) { *bytes = 16; return 0; }
int nvrtcGetPTX(void *program, char *code) { memset(code, 0, 16); return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *text) { *text = 0; return 0; }
const char *nvrtcGetErrorString(int result) { return "stand-in"; }
