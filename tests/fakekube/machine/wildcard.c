/* Preloaded into a pod's processes: who listens on all addresses listens on the pod's, as in a container.
 * Without it, two pods could not have the same port: Ray's processes always listen on all. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static int is_stream(int fd) {
    int type = 0;
    socklen_t length = sizeof type;
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM;
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    const char *pod_ip = getenv("MACHINE_POD_IP");
    struct in_addr own;
    if (pod_ip && address && inet_pton(AF_INET, pod_ip, &own) == 1 && is_stream(fd)) {
        if (address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
            struct sockaddr_in v4 = *(const struct sockaddr_in *)address;
            if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
                v4.sin_addr = own;
                return real(fd, (struct sockaddr *)&v4, sizeof v4);
            }
        }
        if (address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
            struct sockaddr_in6 v6 = *(const struct sockaddr_in6 *)address;
            if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) { /* ::ffff:A.B.C.D */
                int off = 0, v6_only = 0;
                socklen_t size = sizeof v6_only;
                if (getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, &size) == 0 && v6_only) {
                    errno = EADDRNOTAVAIL; /* a pod has no IPv6 address */
                    return -1;
                }
                setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
                memset(v6.sin6_addr.s6_addr + 10, 0xff, 2);
                memcpy(v6.sin6_addr.s6_addr + 12, &own, 4);
                return real(fd, (struct sockaddr *)&v6, sizeof v6);
            }
        }
    }
    return real(fd, address, length);
}
