/* The floor of the latency benchmark: a rank in C. Says `server PID`, waits for its child's pidfd, leaves with code 1. */

#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LIFETIME 600 /* seconds */

int main(void)
{
    pid_t server = fork();
    if (server < 0)
        return 2;
    alarm(LIFETIME);
    if (server == 0) {
        pause();
        _exit(0);
    }
    struct pollfd death = {.fd = (int)syscall(SYS_pidfd_open, server, 0), .events = POLLIN};
    if (death.fd < 0)
        return 3;
    printf("server %d\n", (int)server);
    fflush(stdout);
    while (poll(&death, 1, -1) != 1)
        ;
    _exit(1);
}
