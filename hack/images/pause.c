/* The pod sandbox's process: holds the namespaces, reaps orphans, ends on SIGTERM and SIGINT. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number) { (void)number; _exit(0); }

static void reap(int number) {
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
}

int main(void) {
    struct sigaction ending = {.sa_handler = end}, reaping = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    if (sigaction(SIGTERM, &ending, NULL) || sigaction(SIGINT, &ending, NULL) || sigaction(SIGCHLD, &reaping, NULL))
        return EXIT_FAILURE;
    for (;;)
        pause();
}
