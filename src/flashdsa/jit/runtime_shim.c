/* The two symbols that a TVM-FFI export takes from CuTe DSL's 43 MB runtime library: they turn an
 * error of the CUDA runtime into a Python exception. Everything else is in the static library
 * that the object is linked with, so that users need neither CuTe DSL nor a compiler. */
#include <stdint.h>
#include <stdio.h>

/* What the object was built from; see shared_object.py. */
__attribute__((used, visibility("default"))) const char flashdsa_sources[] = FLASHDSA_SOURCES;

typedef void (*raise_error)(const char *kind, const char **parts, int32_t num_parts);

void CuteDSLRT_TVMFFISetRaisedCudaError(raise_error raise, int32_t code)
{
    static __thread char text[96];
    const char *parts[1] = {text};

    snprintf(text, sizeof text, "CUDA error %d while launching a kernel", (int)code);
    raise("RuntimeError", parts, 1);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(raise_error raise, int32_t x, int32_t y, int32_t z)
{
    static __thread char text[128];
    const char *parts[1] = {text};

    snprintf(text, sizeof text, "CUDA refused a grid of %d x %d x %d blocks", (int)x, (int)y, (int)z);
    raise("RuntimeError", parts, 1);
}
