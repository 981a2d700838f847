"""Names that a container's edits may not use, whatever the rights of its device: variables, device
nodes, folders and annotations with more effect than a device needs.
"""

from __future__ import annotations

import re

__all__ = [
    "ALSO_CALLED",
    "FORBIDDEN",
    "FORBIDDEN_PREFIXES",
    "GUARDED_EXACTLY",
    "GUARDED_FOLDERS",
    "GUARD_FOLDER",
    "GUARD_SOURCE",
    "LOADED_BY_ALL",
    "LOADER",
    "METADATA_FOLDER",
    "OPTIONS",
    "PROGRAM_FOLDERS",
    "PROTECTED_ANNOTATIONS",
    "PROTECTED_NODES",
    "RUNTIMES_OWN",
]

# Variables that make a loader, a shell or an interpreter run another program, or redirect a program
# to another server.
FORBIDDEN_PREFIXES = (
    "LD_",
    "PYTHON",
    "BASH_FUNC_",
    "GIT_",
    "KUBERNETES_",
    "DOTNET_",
    "CORECLR_",
    "COR_",
    "MALLOC_",
    "NPM_CONFIG_",
)
FORBIDDEN = frozenset(
    [
        "PATH",
        "ENV",
        "BASH_ENV",
        "IFS",
        "PS4",
        "SHELL",
        "SHELLOPTS",
        "BASHOPTS",
        "PROMPT_COMMAND",
        "HOME",
        "TMPDIR",
        "GCONV_PATH",
        "LOCPATH",
        "NLSPATH",
        "GLIBC_TUNABLES",
        "HOSTALIASES",
        "RESOLV_HOST_CONF",
        "LOCALDOMAIN",
        "RES_OPTIONS",
        "NODE_OPTIONS",
        "NODE_PATH",
        "NODE_EXTRA_CA_CERTS",
        "PERL5LIB",
        "PERL5OPT",
        "PERL5DB",
        "PERLLIB",
        "RUBYOPT",
        "RUBYLIB",
        "JAVA_TOOL_OPTIONS",
        "_JAVA_OPTIONS",
        "JDK_JAVA_OPTIONS",
        "JAVA_HOME",
        "CLASSPATH",
        "LUA_INIT",
        "LUA_PATH",
        "LUA_CPATH",
        "PHPRC",
        "PHP_INI_SCAN_DIR",
        "R_PROFILE",
        "R_ENVIRON",
        "OPENSSL_CONF",
        "OPENSSL_ENGINES",
        "OPENSSL_MODULES",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "GTK_MODULES",
        "QT_PLUGIN_PATH",
        "CUDA_INJECTION64_PATH",
        "CUDA_INJECTION32_PATH",
        "OCL_ICD_VENDORS",
        "OCL_ICD_FILENAMES",
        "VK_ICD_FILENAMES",
        "VK_DRIVER_FILES",
        "VK_LAYER_PATH",
        "HSA_TOOLS_LIB",
    ]
)
# Nodes that give access to the host's memory, disks, processors or user input. A shorter prefix
# does not cover them.
PROTECTED_NODES = re.compile(
    r"/dev/(k?mem$|port$|kmsg|oldmem|crash$|nvram|[shv]d[a-z]|xvd[a-z]|s[rgt]\d|nst\d|nvme|mmcblk|md\d|md[/_]|dm-|mapper/|disk/|block/|bsg/|loop|nbd|rbd"
    r"|drbd|zram|ram\d|pmem|dax\d|mtd|ubi\d|bcache|btrfs|raw|cpu/|msr|mcelog|snapshot|watchdog|tty|console|vcs|input/|uinput|uhid|hidraw|pts/|ptmx"
    r"|shm/|mqueue/|hugepages|char/|fd\d|fd/|std(in|out|err)$|autofs|userfaultfd|cpu_dma_latency|hwrng|tpm|log$|initctl)"
)
# Nodes that a runtime itself creates in each container. A device with such a name would replace it.
RUNTIMES_OWN = frozenset(
    f"/dev/{name}"
    for name in [
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "ptmx",
        "console",
        "stdin",
        "stdout",
        "stderr",
        "core",
        "fd",
        "pts",
        "shm",
        "mqueue",
    ]
)
# Annotations that a container runtime obeys.
PROTECTED_ANNOTATIONS = re.compile(
    r"cdi\.k8s\.io/|io\.kubernetes\.cri|io\.containerd\.|io\.katacontainers\.|io\.podman\.|run\.oci\.|org\.criu\.|.*nri\."
)
# The gateway's own guard (`container_guard`). No folder can be created in /proc, so its source
# never exists.
GUARD_SOURCE = "/proc/topobus-gateway-has-not-seen-this-container"
GUARD_FOLDER = "/run/topobus/guard"
# Where containers find the gateway's files that describe their devices
# (k8s.io/dynamic-resource-allocation api/metadata, ContainerDir).
METADATA_FOLDER = "/var/run/kubernetes.io/dra-device-attributes"
# A mount below these would change what the runtime or the gateway protects, or what starts with
# every program.
GUARDED_FOLDERS = (
    "/proc",
    "/sys",
    "/dev/pts",
    "/dev/mqueue",
    "/run/secrets",
    "/var/run/secrets",
    "/etc/ld.so.preload",
    "/etc/ld.so.cache",
    METADATA_FOLDER,
    METADATA_FOLDER.removeprefix("/var"),
)
GUARDED_EXACTLY = frozenset(
    [
        "/",
        "/dev",
        "/etc",
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/usr",
        "/usr/bin",
        "/usr/sbin",
        "/usr/lib",
        "/usr/lib64",
        "/usr/local",
        "/run",
        "/var",
        "/var/run",
        "/tmp",
        "/root",
        "/home",
        "/opt",
    ]
)
# A file mounted here replaces a program. Only a file with the same path on the host, or below the
# root of a driver, is that program.
PROGRAM_FOLDERS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin")
# The program that starts every other one, and the libraries that nearly every program loads (glibc,
# musl, PAM).
LOADER = re.compile(r"ld(-[A-Za-z0-9_.-]+|64|)\.so(\.[0-9]+)*|ld-musl-.*")
LOADED_BY_ALL = re.compile(
    r"lib(c|m|dl|rt|pthread|resolv|util|crypt|crypto|ssl|nsl|nss_[a-z]+|pam[a-z_]*|selinux|audit|cap|gcc_s|stdc\+\+|z|musl|systemd)[-.].*"
)
# GLVND loads the vendor's library for indirect rendering by the first name (libglvnd,
# src/GLX/libglxmapping.c), Mesa's GBM the vendor's back end by the second.
ALSO_CALLED = {"libGLX_nvidia": "libGLX_indirect", "libnvidia-allocator": "nvidia-drm_gbm"}
OPTIONS = frozenset(
    [
        "ro",
        "rw",
        "bind",
        "rbind",
        "nosuid",
        "nodev",
        "noexec",
        "private",
        "rprivate",
        "slave",
        "rslave",
        "relatime",
        "noatime",
    ]
)
