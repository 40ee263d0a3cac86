#!/bin/sh
# Writes the flat manifests of this directory from the Helm charts; tests/deploy checks that they are up to date.
#   deploy/kubernetes/render.sh [directory]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here}

render() {
  name=$1 chart=$2
  shift 2
  {
    echo "# Made by render.sh from deploy/helm/$chart: change the chart, not this file."
    # Helm reports the links to the alerts on its standard error output.
    helm template "$chart" "$here/../helm/$chart" --namespace queen "$@" 2> "$target/.errors" |
      sed -e '/^# Source: /d' -e '/helm\.sh\/chart: /d' -e '/app\.kubernetes\.io\/managed-by: Helm/d'
  } > "$target/$name"
  grep -v 'found symbolic link in path' "$target/.errors" >&2 || true
  rm -f "$target/.errors"
}

render queen.yaml queen
render queen-embedded.yaml queen --set postgres.embedded=true,replicas=1,peers.enabled=false,podDisruptionBudget.enabled=false \
  --set envFrom=null
render queen-monitoring.yaml queen --set serviceMonitor.enabled=true,prometheusRule.enabled=true \
  --show-only templates/monitoring.yaml
render queen-proxy.yaml queen-proxy --set httpRoute.enabled=true,proxyHostName=queen.example.com
