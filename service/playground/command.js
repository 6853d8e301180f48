/** What was last asked of the service, as a line for a shell, and how long it took. */

import { announce, byId, say } from "./dom.js";

export function showCommand({ command, note, status, milliseconds, stages: { total, ...stages } = {} }) {
  if (command.includes("/predict?") && total !== undefined) say(byId("took"), `answered in ${total.toFixed(1)} ms`);
  say(byId("command").firstElementChild, command);
  byId("copy").disabled = false;
  if (status) return say(byId("latency"), `${note && `${note} `}Refused, with status ${status}.`);
  const parts = Object.entries(stages).map(([name, value]) => `${name} ${value.toFixed(1)}`);
  const inside = total === undefined ? "" : `${total.toFixed(1)} ms in the service${parts.length ? ` (${parts.join(", ")})` : ""}; `;
  const whole = `${milliseconds.toFixed(0)} ms`;
  const cached = milliseconds < total; // what the service says it took was then
  const took = cached ? `${whole}, from this browser’s cache.` : `${inside}${whole} for the round trip.`;
  say(byId("latency"), `${note && `${note} `}${took}`);
}

/** The clipboard is the browser's to give: over plain HTTP from another host it is not, and then the line is selected instead. */
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
