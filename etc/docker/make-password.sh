#!/bin/sh
# Create a password: redis-password for the daemon, and users.acl with its hash for the server.
# Run this script as root. To change the password, run it again.
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
# The daemon (user 10001 in the image) rejects a password file that other users can read.
chmod 0400 redis-password
chown 10001:10001 redis-password
echo "wrote redis-password and users.acl"
