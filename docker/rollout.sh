#!/usr/bin/env bash
# Renews the running replicas of the service without losing a request: new ones from the present image, settings and models are
# started beside the old, and when they are ready the old are told to stop and finish what they have accepted.
#   docker/rollout.sh -f docker-compose.yml -f docker/compose.cpu.yml -f docker/compose.replicas.yml
# The arguments are those of `docker compose` with which it was started. For a while there are twice as many replicas. Where a new one
# is not ready within ROLLOUT_WAIT seconds (120), the new ones go and the old ones stay: exit status 1.
set -euo pipefail
compose() { docker compose "${files[@]}" "$@"; }
files=("$@")

# Those that somebody stopped go first: `up` would start them again as they were, and they would pass for new.
mapfile -t stopped < <(compose ps --all --quiet --status exited --status created capserve)
[ ${#stopped[@]} = 0 ] || docker rm "${stopped[@]}" >/dev/null
mapfile -t old < <(compose ps --quiet capserve)
count=${#old[@]}
[ "$count" -gt 0 ] || { echo "no replica of capserve is running: nothing to renew" >&2; exit 1; }

echo "starting $count beside $count"
new() { compose ps --all --quiet capserve | grep -vFx "$(printf '%s\n' "${old[@]}")"; }
# `up --wait` would wait for the old as well, and one that is ill may be the reason for all this.
healthy() { [ "$(new | xargs docker inspect --format '{{.State.Health.Status}}' | grep -cx healthy)" = "$count" ]; }
start() {
  compose up --detach --no-deps --no-recreate --scale capserve=$((2 * count)) capserve || return
  until healthy; do
    [ "$SECONDS" -lt "${ROLLOUT_WAIT:-120}" ] || return
    sleep 1
  done
}
if ! start; then
  echo "the new replicas did not become ready; the old ones go on" >&2
  new | while read -r each; do
    docker logs --tail 5 "$each" >&2
    docker rm --force "$each" >/dev/null
  done
  exit 1
fi
for each in "${old[@]}"; do
  echo "stopping ${each:0:12}"
  docker stop "$each" >/dev/null  # SIGTERM, and the time that stop_grace_period gives
  docker rm "$each" >/dev/null
done
compose ps capserve
