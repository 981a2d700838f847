#!/bin/sh
# Starts NATS in compose and in Kubernetes: start.sh CONFIGURATION STORE [ACCOUNT].
# Before that it moves what is stored to the account that the configuration has: a server keeps
# streams below jetstream/<account>, and one without accounts names its only one $G. With accounts
# the streams are in ACCOUNT: NODE by default, CORE for a hub. A rename moves all of them or none.
# Where both have streams it is not known which ledger is the present one. Then NATS is not started,
# and each try prints that, until MOVE_AWAY names the account whose streams are not to be used.
set -eu
configuration=$1
home=$2/jetstream
cd "$(dirname "$configuration")"
# shellcheck disable=SC2046  # names of files, without spaces
if cat "$configuration" $(sed -n 's/^ *include *//p' "$configuration") | grep -q '^accounts {'; then
  wanted=${3:-NODE}
else
  wanted='$G'
fi
has_streams() { [ -n "$(ls -A "$home/$1/streams" 2> /dev/null)" ]; }
with_streams=0
for account in '$G' NODE CORE; do
  if has_streams "$account"; then with_streams=$((with_streams + 1)); fi
done
# Of one account alone nothing is moved: that may be what NATS stored since.
if [ "$with_streams" -gt 1 ] && [ -n "${MOVE_AWAY:-}" ] && has_streams "$MOVE_AWAY" && [ ! -e "$2/$MOVE_AWAY-before" ]; then
  mv "$home/$MOVE_AWAY" "$2/$MOVE_AWAY-before"
  sync
  echo "NATS' store $home: the streams of account $MOVE_AWAY are now in $2/$MOVE_AWAY-before"
fi
other=
for account in '$G' NODE CORE; do
  if [ "$account" = "$wanted" ] || ! has_streams "$account"; then continue; fi
  if [ -n "$other" ] || has_streams "$wanted"; then
    echo "NATS' store $home has streams of two accounts, ${other:-$wanted} and $account: two ledgers. Move away the one that is not to be used, and keep it until all is well." >&2
    if [ -n "${KUBERNETES_SERVICE_HOST:-}" ]; then
      echo "next: kubectl -n topobus set env statefulset/nats -c nats 'MOVE_AWAY=<account>', then kubectl -n topobus delete pod -l app.kubernetes.io/name=nats; it is moved to $2/<account>-before" >&2
      exit 78
    fi
    echo "next: docker compose run --rm --no-deps --entrypoint /bin/sh nats -c 'mv \"$home/<account>\" \"$2/<account>-before\"'" >&2
    exit 78
  fi
  other=$account
done
if [ -n "$other" ]; then
  if [ -d "$home/$wanted/streams" ]; then rmdir "$home/$wanted/streams"; fi
  if [ -d "$home/$wanted" ]; then rmdir "$home/$wanted"; fi
  mv "$home/$other" "$home/$wanted"
  sync
  echo "NATS' store $home: the streams of account $other are now those of account $wanted"
fi
exec nats-server -c "$configuration" ${PID_FILE:+-P "$PID_FILE"}
