/* A server of MPS for tests: a process of the daemon's that works until it is ended. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s/server.log", getenv("CUDA_MPS_LOG_DIRECTORY") ?: "/tmp");
    FILE *log = fopen(path, "a");
    if (log) {
        fprintf(log, "[Server %d] Received new client request\n", getpid());
        fclose(log);
    }
    /* By this the daemon knows that it runs. */
    close(90);
    for (;;) pause();
}
