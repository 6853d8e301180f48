/** Shows the last request to the service as a shell command, and how long it took. */

import { announce, byId, say } from "./dom.js";

export function showCommand({ command, note, status, milliseconds, stages: { total, ...stages } = {} }) {
  if (command.includes("/predict?") && total !== undefined) say(byId("took"), `answered in ${total.toFixed(1)} ms`);
  say(byId("command").firstElementChild, command);
  byId("copy").disabled = false;
  if (status) return say(byId("latency"), `${note && `${note} `}Refused, with status ${status}.`);
  const parts = Object.entries(stages).map(([name, value]) => `${name} ${value.toFixed(1)}`);
  const inside = total === undefined ? "" : `${total.toFixed(1)} ms in the service${parts.length ? ` (${parts.join(", ")})` : ""}; `;
  const whole = `${milliseconds.toFixed(0)} ms`;
  const cached = milliseconds < total; // the service's figure is of the earlier request
  const took = cached ? `${whole}, from this browser’s cache.` : `${inside}${whole} for the round trip.`;
  say(byId("latency"), `${note && `${note} `}${took}`);
}

/** Copies the command. Over plain HTTP from another host browsers give no access to the clipboard: then it is selected instead. */
export async function copyCommand() {
  const line = byId("command").firstElementChild;
  try {
    await navigator.clipboard.writeText(line.textContent);
    acknowledge("Copied");
  } catch {
    getSelection().selectAllChildren(line);
    acknowledge("Selected");
  }
}

function acknowledge(word) {
  byId("copy").textContent = word;
  announce(word);
  setTimeout(() => (byId("copy").textContent = "Copy"), 1500);
}
