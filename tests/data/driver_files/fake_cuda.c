/* Stands for libcuda: a real library whose functions say which nodes of GPUs this container can open. No libc, so that any loader takes it (x86-64 Linux). */
static long call(long number, long first, long second, long third, long fourth) {
    long result;
    register long r10 __asm__("r10") = fourth;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second), "d"(third), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

int cuInit(unsigned flags) { return (int)flags; }

/* A bit for each of /dev/nvidia0 to /dev/nvidia7 that opens for reading and writing. */
int topobus_open_gpus(void) {
    char path[] = "/dev/nvidia0";
    int bits = 0;
    for (int minor = 0; minor < 8; minor++) {
        path[11] = (char)('0' + minor);
        long handle = call(257, -100, (long)path, 2, 0);
        if (handle >= 0) {
            bits |= 1 << minor;
            call(3, handle, 0, 0, 0);
        }
    }
    return bits;
}
