// The current batch: a bar for each slot of the KV cache, the waiting sequences, and a table of all
// of them.

import { byId, make } from "../common/dom.js";
import { formatCount } from "../common/format.js";

const MAX_WAITING = 24; // drawn; the table has all
const SHORT_ID = 10;

const slots = []; // by row of the KV cache
const tableRows = new Map(); // by sequence id

/** Create a bar for each slot. */
export function startBatch(maxNumSeqs) {
  for (let row = 0; row < maxNumSeqs; row += 1) {
    const parts = {
      prompt: make("span", { class: "slot-prompt" }),
      output: make("span", { class: "slot-output" }),
    };
    const slot = make("div", { class: "slot" }, parts.output, parts.prompt);
    slots.push({ slot, ...parts });
  }
  byId("batch-slots").replaceChildren(...slots.map(({ slot }) => slot));
}

/** Show a response of /debug/batch. */
export function showBatch({ sequences }) {
  const byRow = new Map(sequences.filter((one) => one.row !== null).map((one) => [one.row, one]));
  for (const [row, slot] of slots.entries()) fillSlot(slot, row, byRow.get(row));
  const waiting = sequences.filter((one) => one.state === "waiting");
  showWaiting(waiting);
  byId("batch-slots").setAttribute("aria-label", summaryOf(sequences));
  byId("batch-idle").hidden = sequences.length > 0;
  byId("batch-scroll").hidden = sequences.length === 0;
  showTable(sequences);
}

function summaryOf(sequences) {
  const count = (state) => sequences.filter((one) => one.state === state).length;
  return (
    `${slots.length} slots: ${count("running")} running, ${count("prefilling")} prefilling; ` +
    `${count("waiting")} waiting for a slot`
  );
}

/**
 * Fill a bar: the computed prompt from below, then the new tokens. Full height is all that the
 * request may take.
 */
function fillSlot({ slot, prompt, output }, row, sequence) {
  slot.dataset.state = sequence?.state ?? "free";
  slot.title = `Slot ${row}: ${sequence ? `${sequence.request_id}, ${sequence.state}` : "free"}`;
  const most = sequence ? Math.max(1, sequence.prompt_tokens + sequence.max_tokens) : 1;
  const computed = sequence ? Math.min(sequence.computed_tokens, sequence.prompt_tokens) : 0;
  prompt.style.height = `${(100 * computed) / most}%`;
  output.style.height = `${(100 * (sequence?.generated_tokens ?? 0)) / most}%`;
}

function showWaiting(waiting) {
  const drawn = waiting
    .slice(0, MAX_WAITING)
    .map((one) => make("span", { class: "waiter", title: one.request_id }));
  const rest = waiting.length - drawn.length;
  byId("batch-waiting").replaceChildren(
    ...drawn,
    ...(rest > 0 ? [`and ${formatCount(rest)} more`] : []),
  );
  byId("batch-waiting-none").hidden = waiting.length > 0;
}

function showTable(sequences) {
  const known = new Set(sequences.map((one) => one.sequence_id));
  for (const [id, { line }] of tableRows) {
    if (known.has(id)) continue;
    line.remove();
    tableRows.delete(id);
  }
  for (const sequence of sequences) {
    if (!tableRows.has(sequence.sequence_id))
      tableRows.set(sequence.sequence_id, newLine(sequence));
    fillLine(tableRows.get(sequence.sequence_id), sequence);
  }
}

function newLine({ request_id: id }) {
  const short = id.length > SHORT_ID ? `${id.slice(0, SHORT_ID)}…` : id;
  const cells = {};
  for (const name of ["state", "row", "prompt", "cached", "computed", "generated", "seconds"]) {
    cells[name] = make("td", { class: name === "state" ? "" : "number" });
  }
  const text = make("span", {});
  const progress = make("progress", { max: 1, value: 0, "aria-label": "New tokens" });
  cells.generated.append(text, " ", progress);
  const name = make("th", { scope: "row", title: id }, make("code", {}, short));
  const line = make("tr", {}, name, ...Object.values(cells));
  byId("batch-table").append(line);
  return { line, cells, text, progress };
}

/** Update only what has changed, so that selected text stays selected. */
function fillLine({ line, cells, text, progress }, sequence) {
  line.dataset.state = sequence.state;
  setText(cells.state, sequence.state);
  setText(cells.row, sequence.row === null ? "–" : sequence.row);
  setText(cells.prompt, formatCount(sequence.prompt_tokens));
  setText(cells.cached, formatCount(sequence.cached_tokens));
  setText(cells.computed, formatCount(sequence.computed_tokens));
  setText(text, `${formatCount(sequence.generated_tokens)} of ${formatCount(sequence.max_tokens)}`);
  setText(cells.seconds, sequence.seconds.toFixed(1));
  progress.value = sequence.generated_tokens / Math.max(1, sequence.max_tokens);
}

function setText(element, value) {
  if (element.textContent !== String(value)) element.textContent = value;
}
