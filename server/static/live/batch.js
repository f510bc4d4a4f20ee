// The current batch: a bar for each slot of the KV cache, the waiting sequences, and a table of all
// of them.

import { byId, clone, make } from "../common/dom.js";
import { formatCount } from "../common/format.js";

const MAX_WAITING = 24; // drawn; the table has all
const SHORT_ID = 10;

/** Create a bar for each slot. */
export function startBatch(maxNumSeqs) {
  for (let row = 0; row < maxNumSeqs; row += 1) byId("batch-slots").append(clone("slot-template"));
}

/** Show a response of /debug/batch. */
export function showBatch({ sequences }) {
  const slots = [...byId("batch-slots").children];
  for (const [row, slot] of slots.entries())
    fillSlot(slot, row, sequences.find((one) => one.row === row));
  const { running = [], prefilling = [], waiting = [] } = Object.groupBy(
    sequences,
    (one) => one.state,
  );
  showWaiting(waiting);
  byId("batch-slots").ariaLabel =
    `${slots.length} slots: ${running.length} running, ${prefilling.length} prefilling; ` +
    `${waiting.length} waiting for a slot`;
  byId("batch-idle").hidden = sequences.length > 0;
  byId("batch-scroll").hidden = sequences.length === 0;
  showTable(sequences);
}

/**
 * Fill a bar: the computed prompt from below, then the new tokens. Full height is all that the
 * request may take.
 */
function fillSlot(slot, row, sequence) {
  slot.dataset.state = sequence?.state ?? "free";
  slot.title = `Slot ${row}: ${sequence ? `${sequence.request_id}, ${sequence.state}` : "free"}`;
  const most = sequence ? Math.max(1, sequence.prompt_tokens + sequence.max_tokens) : 1;
  const computed = sequence ? Math.min(sequence.computed_tokens, sequence.prompt_tokens) : 0;
  const [output, prompt] = slot.children;
  prompt.style.height = `${(100 * computed) / most}%`;
  output.style.height = `${(100 * (sequence?.generated_tokens ?? 0)) / most}%`;
}

function showWaiting(waiting) {
  const drawn = waiting
    .slice(0, MAX_WAITING)
    .map((one) => make("span", { class: "waiter", title: one.request_id }));
  const rest = waiting.length - drawn.length;
  byId("batch-waiting").replaceChildren(...drawn, rest > 0 ? `and ${formatCount(rest)} more` : "");
  byId("batch-waiting-none").hidden = waiting.length > 0;
}

function showTable(sequences) {
  const gone = new Map([...byId("batch-table").rows].map((line) => [line.dataset.sequence, line]));
  for (const sequence of sequences) {
    const id = `${sequence.sequence_id}`;
    fillLine(gone.get(id) ?? newLine(sequence), sequence);
    gone.delete(id);
  }
  for (const line of gone.values()) line.remove();
}

function newLine({ request_id: id, sequence_id: number }) {
  const short = id.length > SHORT_ID ? `${id.slice(0, SHORT_ID)}…` : id;
  const parts = { id: [{ title: id }], short };
  const line = clone("sequence-template", parts, { "data-sequence": number });
  byId("batch-table").append(line);
  return line;
}

/** Update only what has changed, so that selected text stays selected. */
function fillLine(line, sequence) {
  line.dataset.state = sequence.state;
  const texts = {
    state: sequence.state,
    row: `${sequence.row ?? "–"}`,
    prompt: formatCount(sequence.prompt_tokens),
    cached: formatCount(sequence.cached_tokens),
    computed: formatCount(sequence.computed_tokens),
    generated: `${formatCount(sequence.generated_tokens)} of ${formatCount(sequence.max_tokens)}`,
    seconds: sequence.seconds.toFixed(1),
  };
  for (const [name, text] of Object.entries(texts)) {
    const element = line.querySelector(`[data-part="${name}"]`);
    if (element.textContent !== text) element.textContent = text;
  }
  line.querySelector("progress").value =
    sequence.generated_tokens / Math.max(1, sequence.max_tokens);
}
