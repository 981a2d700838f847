/* Loads libcuda.so.1 as CUDA's runtime does, asks it how many devices it sees, and prints where it was found. Needs libc alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

int main(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("dlopen: %s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    int (*count)(void) = (int (*)(void))dlsym(library, "topobus_open_gpus");
    struct link_map *map = 0;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    printf("library %s\ninit %d\ngpus %d\n", map->l_name, init(0), count());
    return 0;
}
