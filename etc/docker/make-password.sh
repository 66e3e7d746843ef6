#!/bin/sh
# Write redis-password, for the daemon, and users.acl, for the server, which holds its hash alone.
# Run it as root, in this folder; run it again for a new password.
set -eu
cd "$(dirname "$0")"
umask 077
rm -f redis-password users.acl
password=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
printf '%s\n' "$password" >redis-password
{
    echo "user default off"
    sed "s/\$/ #$hash/" ../acl/daemon.acl
} >users.acl
chmod 0444 users.acl
# The daemon refuses a password that others than its user may read: 10001 is that of the image.
chmod 0400 redis-password
chown 10001:10001 redis-password
echo "wrote redis-password and users.acl"
