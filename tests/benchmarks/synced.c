/* Notes how much of each file is safe on the disk, for tests/benchmarks/bounds.py.

   Preloaded into a server. After every fsync and fdatasync it writes a line to the file that
   SYNCED_LOG names: the size that the file had before the call, a space, its path. With SYNC_SECONDS
   each call takes that much longer, as on a slow disk; tests preload it for this alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int sync_and_note(const char *call, int fd)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, call);
    struct stat before;
    int known = fstat(fd, &before) == 0;
    const char *seconds = getenv("SYNC_SECONDS");
    if (seconds != NULL)
        usleep((useconds_t)(atof(seconds) * 1e6));
    int result = real(fd);
    const char *log = getenv("SYNCED_LOG");
    if (result != 0 || !known || log == NULL)
        return result;
    char link[64], path[PATH_MAX], line[PATH_MAX + 32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return result;
    path[length] = '\0';
    int size = snprintf(line, sizeof line, "%lld %s\n", (long long)before.st_size, path);
    int out = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (out >= 0) {
        if (write(out, line, (size_t)size) < 0)
            perror(log);
        close(out);
    }
    return result;
}

int fsync(int fd) { return sync_and_note("fsync", fd); }
int fdatasync(int fd) { return sync_and_note("fdatasync", fd); }
