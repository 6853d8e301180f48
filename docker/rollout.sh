#!/usr/bin/env bash
# Renews the running replicas of the service without losing a request: new ones with the present image, settings and models are
# started beside the old ones; when they are ready, the old ones are told to stop and finish what they have accepted.
#   docker/rollout.sh -f docker-compose.yml -f docker/compose.cpu.yml -f docker/compose.replicas.yml
# The arguments are those of the `docker compose` that started the service. For a while there are twice as many replicas. If a new one
# is not ready within ROLLOUT_WAIT seconds (120), or this is interrupted before all are, the new ones are removed and the old ones
# stay: exit status 1, or the signal's. Once all are ready the old ones are removed, and nothing interrupts that.
set -euo pipefail
compose() { docker compose "${files[@]}" "$@"; }
files=("$@")

# Not by `docker compose ps --all`, which also lists what `docker compose run` has started.
project=$(compose config | sed -n 's/^name: //p' | tr -d '"')
labels=(com.docker.compose.project="$project" com.docker.compose.service=capserve com.docker.compose.oneoff=False)

# Two rollouts at once would take each other's new replicas for old ones.
lock=${TMPDIR:-/tmp}/capserve-rollout.$project
[ -e "$lock" ] || : >"$lock"
exec 9<"$lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
  echo "another rollout of $project is under way" >&2
  exit 1
fi

replicas() { docker ps --no-trunc --quiet "${labels[@]/#/--filter=label=}" "$@"; }

mapfile -t old < <(replicas)
count=${#old[@]}
[ "$count" -gt 0 ] || { echo "no replica of capserve is running: nothing to renew" >&2; exit 1; }
# Stopped replicas are removed first: `up` would start them again as they were, and they would pass for new ones.
mapfile -t stopped < <(replicas --all --filter status=exited --filter status=created)
[ ${#stopped[@]} = 0 ] || docker rm "${stopped[@]}" >/dev/null

# A key exported in the shell that started the old replicas may be missing in this one, and without it everybody would be let in.
keys=$(docker inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "${old[@]}" | grep -c '^CAPSERVE_API_KEY=.' || true)
told=$(compose config capserve | grep '^ *CAPSERVE_API_KEY:' | grep -cvx ' *CAPSERVE_API_KEY: null' || true)
if [ "$keys" != 0 ] && [ "$told" = 0 ]; then
  echo "the old replicas ask for a key and the new ones would not: put CAPSERVE_API_KEY into .env, empty if nobody is to be asked" >&2
  exit 1
fi

new() { replicas --all | grep -vFx "$(printf '%s\n' "${old[@]}")"; }
# `up --wait` would wait for the old replicas as well, and an unhealthy one may be the reason for this rollout.
healthy() { [ "$(new | xargs docker inspect --format '{{.State.Health.Status}}' | grep -cx healthy)" = "$count" ]; }
start() {
  compose up --detach --no-deps --no-recreate --scale capserve=$((2 * count)) capserve || return
  until healthy; do
    [ "$SECONDS" -lt "${ROLLOUT_WAIT:-120}" ] || return
    sleep 1
  done
}
give_up() {
  trap '' HUP INT TERM
  set +e  # if one cannot be removed, the others still are
  echo "the new replicas are removed; the old ones go on" >&2
  new | while read -r each; do
    docker logs --tail 5 "$each" >&2
    docker rm --force "$each" >/dev/null
  done
}
# New replicas left behind would be counted as old by the next rollout.
trap give_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

echo "starting $count beside $count"
start || { echo "the new replicas did not become ready" >&2; exit 1; }
trap - EXIT
trap '' HUP INT TERM  # otherwise old and new would serve beside each other
for each in "${old[@]}"; do
  echo "stopping ${each:0:12}"
  docker stop "$each" >/dev/null  # SIGTERM, then as long as stop_grace_period allows
  docker rm "$each" >/dev/null
done
compose ps capserve
