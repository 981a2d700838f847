/* A control daemon of MPS for tests: a real process that goes into the background, listens in the folder of pipes, obeys the commands that Topobus gives, and writes logs.
 * Names of variables, commands and files are those of NVIDIA's Multi-Process Service guide; how clients talk to it is its own.
 *
 *   nvidia-cuda-mps-control -d      become a daemon
 *   nvidia-cuda-mps-control         give it the commands of standard input, print its answers
 *
 * A client of the GPU connects to `control` and says `client`: the daemon starts a server if there is none, says `ready`, and keeps the connection until the client or it ends.
 * How it misbehaves stands in the file `behaviour` beside the program: `fails` (does not start), `mute` (never listens), `deaf` (ignores quit).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_CLIENTS 60
#define TEXT 512
/* The server's descriptor of a pipe, by which it says that it runs. */
#define SERVER_RUNS 90

static char pipes[TEXT], logs[TEXT], own_folder[TEXT];
static char threads[32] = "100", memory[16][32];
static pid_t server;

static void note(const char *format, ...)
{
    char path[TEXT + 32];
    snprintf(path, sizeof path, "%s/control.log", logs);
    FILE *log = fopen(path, "a");
    if (!log) return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(log, "[%ld Control %d] ", (long)time(NULL), getpid());
    vfprintf(log, format, arguments);
    fputc('\n', log);
    va_end(arguments);
    fclose(log);
}

static int behaves(const char *how)
{
    char path[TEXT + 32], text[64] = "";
    snprintf(path, sizeof path, "%s/behaviour", own_folder);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (!fgets(text, sizeof text, file)) text[0] = 0;
    fclose(file);
    return strstr(text, how) != NULL;
}

static int address_of(struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    return snprintf(address->sun_path, sizeof address->sun_path, "%s/control", pipes) < (int)sizeof address->sun_path;
}

static int connected(void)
{
    struct sockaddr_un address;
    int handle = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (address_of(&address) && connect(handle, (struct sockaddr *)&address, sizeof address) == 0) return handle;
    close(handle);
    return -1;
}

static void start_server(void)
{
    if (server && waitpid(server, NULL, WNOHANG) == 0) return;
    int started[2];
    if (pipe2(started, O_CLOEXEC)) return;
    server = fork();
    if (server == 0) {
        dup2(started[1], SERVER_RUNS);
        execlp("nvidia-cuda-mps-server", "nvidia-cuda-mps-server", (char *)NULL);
        _exit(127);
    }
    char nothing;
    close(started[1]);
    /* The server closes its end when it runs: before, its environment is nobody's to read. */
    if (read(started[0], &nothing, 1) < 0) note("no word of the server");
    close(started[0]);
    note("Starting new server %d for user %d", server, getuid());
}

static void answer(char *command, int handle, int *is_over)
{
    char reply[TEXT] = "";
    unsigned ordinal;
    char value[32];
    note("User did send command: %s", command);
    if (!strcmp(command, "get_server_list")) {
        if (server && waitpid(server, NULL, WNOHANG) == 0) snprintf(reply, sizeof reply, "%d\n", server);
    } else if (sscanf(command, "set_default_active_thread_percentage %31s", value) == 1) {
        snprintf(threads, sizeof threads, "%s", value);
        snprintf(reply, sizeof reply, "%s\n", threads);
    } else if (!strcmp(command, "get_default_active_thread_percentage")) {
        snprintf(reply, sizeof reply, "%s\n", threads);
    } else if (sscanf(command, "set_default_device_pinned_mem_limit %u %31s", &ordinal, value) == 2 && ordinal < 16) {
        snprintf(memory[ordinal], sizeof memory[ordinal], "%s", value);
    } else if (sscanf(command, "get_default_device_pinned_mem_limit %u", &ordinal) == 1 && ordinal < 16) {
        snprintf(reply, sizeof reply, "%s\n", memory[ordinal]);
    } else if (!strncmp(command, "quit", 4)) {
        *is_over = !behaves("deaf");
    } else if (strncmp(command, "set_", 4)) {
        snprintf(reply, sizeof reply, "Unknown command\n");
    }
    if (*reply && write(handle, reply, strlen(reply)) < 0) note("client went away");
}

static void serve(int listener)
{
    struct pollfd seen[MOST_CLIENTS + 1] = {{.fd = listener, .events = POLLIN}};
    int count = 1, is_over = 0;
    while (!is_over) {
        if (poll(seen, count, -1) < 0) continue;
        if (seen[0].revents && count <= MOST_CLIENTS) {
            int handle = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            if (handle >= 0) seen[count++] = (struct pollfd){.fd = handle, .events = POLLIN};
        }
        for (int index = count - 1; index > 0; index--) {
            char line[TEXT];
            if (!seen[index].revents) continue;
            ssize_t size = read(seen[index].fd, line, sizeof line - 1);
            if (size > 0) {
                line[size] = 0;
                line[strcspn(line, "\n")] = 0;
                if (!strcmp(line, "client")) {
                    start_server();
                    if (write(seen[index].fd, "ready\n", 6) == 6) continue;
                } else {
                    answer(line, seen[index].fd, &is_over);
                }
            }
            close(seen[index].fd);
            seen[index] = seen[--count];
        }
    }
    if (server) {
        kill(server, SIGKILL);
        waitpid(server, NULL, 0);
    }
    note("Exit");
}

static int become_daemon(void)
{
    struct sockaddr_un address;
    if (behaves("fails")) {
        note("Failed to start: no CUDA-capable device is detected");
        fprintf(stderr, "no CUDA-capable device is detected\n");
        return 1;
    }
    int present = connected();
    if (present >= 0) {
        fprintf(stderr, "An instance of this daemon is already running\n");
        return 1;
    }
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!address_of(&address) || bind(listener, (struct sockaddr *)&address, sizeof address) || chmod(address.sun_path, 0666)) {
        fprintf(stderr, "%s: %s\n", pipes, strerror(errno));
        return 1;
    }
    if (!behaves("mute")) listen(listener, MOST_CLIENTS);
    if (fork()) _exit(0);
    setsid();
    int nothing = open("/dev/null", O_RDWR);
    for (int handle = 0; handle < 3; handle++) dup2(nothing, handle);
    signal(SIGPIPE, SIG_IGN);
    note("Starting control daemon using socket %s, devices %s", address.sun_path, getenv("CUDA_VISIBLE_DEVICES"));
    serve(listener);
    unlink(address.sun_path);
    return 0;
}

static int ask(void)
{
    char line[TEXT], reply[TEXT];
    while (fgets(line, sizeof line, stdin)) {
        int handle = connected();
        if (handle < 0) {
            fprintf(stderr, "Cannot find MPS control daemon process\n");
            return 1;
        }
        if (write(handle, line, strlen(line)) < 0) return 1;
        ssize_t size;
        while ((size = read(handle, reply, sizeof reply)) > 0) fwrite(reply, 1, size, stdout);
        close(handle);
    }
    return 0;
}

int main(int count, char **arguments)
{
    ssize_t size = readlink("/proc/self/exe", own_folder, sizeof own_folder - 1);
    own_folder[size > 0 ? size : 0] = 0;
    dirname(own_folder);
    snprintf(pipes, sizeof pipes, "%s", getenv("CUDA_MPS_PIPE_DIRECTORY") ?: "/tmp/nvidia-mps");
    snprintf(logs, sizeof logs, "%s", getenv("CUDA_MPS_LOG_DIRECTORY") ?: "/var/log/nvidia-mps");
    return count > 1 && !strcmp(arguments[1], "-d") ? become_daemon() : ask();
}
