// Reads custom resources from standard input, a JSON array; prints what is wrong with each, as a JSON array of strings.
import { readFileSync } from "node:fs";

const packages = {
  "gateway.networking.k8s.io/v1": () => import("@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1"),
  "keda.sh/v1alpha1": () => import("@kubernetes-models/keda/keda.sh/v1alpha1"),
  "monitoring.coreos.com/v1": () => import("@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"),
};

const faults = [];
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    const models = await packages[resource.apiVersion]();
    new models[resource.kind](resource).validate();
  } catch (error) {
    faults.push(`${resource.kind} ${resource.metadata?.name}: ${error.message}`);
  }
}
console.log(JSON.stringify(faults));
