// The batches view: files of requests that the server answers in the background, those of this key.

import { getJson, postJson, request } from "../common/api.js";
import { linesFor } from "./examples.js";
import { download } from "../common/copying.js";
import { byId, clone, showError } from "../common/dom.js";
import { formatCount } from "../common/format.js";
import { Repeated } from "../common/pause.js";

const EVERY_MS = 1000;
const MOST = 100; // batches that are listed, as many as the server gives at once
const LONGEST_LINE = 2 ** 22; // bytes
const SHOWN_FAULTS = 5;
const ENDED = ["failed", "completed", "expired", "cancelled"];
const CANCELLABLE = ["validating", "in_progress"];
const ABSENT = [400, 403, 404]; // no batches here, or none for this key

const names = new Map(); // of files, by id
const items = new Map(); // of the list, by the batch's id
let polling;
let isShown = false;
let isRefused = false; // polling again would not help
let isExpecting = true; // something may change
let nLooks = 0;

export function start(card) {
  polling = new Repeated(poll, EVERY_MS);
  const lines = linesFor(card);
  byId("batch-line").textContent = lines[0];
  byId("batch-example").addEventListener("click", () =>
    download("requests.jsonl", new Blob([`${lines.join("\n")}\n`])),
  );
  byId("batch-form").addEventListener("submit", (event) => {
    event.preventDefault();
    create(byId("batch-file").files[0]);
  });
  document.addEventListener("visibilitychange", updatePolling);
  window.addEventListener("kvasir:new-key", look);
}

export function show() {
  isShown = true;
  look();
}

export function hide() {
  isShown = false;
  updatePolling();
}

/** Poll until all batches have ended. */
function look() {
  [isRefused, isExpecting] = [false, true];
  nLooks += 1;
  updatePolling();
}

const updatePolling = () => polling.want(isShown && isExpecting && !isRefused && !document.hidden);

async function poll(signal) {
  const before = nLooks;
  try {
    const { data } = await getJson(`v1/batches?limit=${MOST}`, { signal });
    if (data.some((batch) => !names.has(batch.input_file_id))) await readNames(data, signal);
    byId("batches-on").hidden = false;
    byId("batches-off").hidden = true;
    showError(byId("batches-error"), "");
    showAll(data);
    if (before === nLooks) isExpecting = data.some(({ status }) => !ENDED.includes(status));
  } catch (error) {
    if (!signal.aborted) showProblem(error);
  }
  updatePolling();
}

/** Read the names of the batches' files. That of a file that was deleted is its id. */
async function readNames(batches, signal) {
  const { data } = await getJson("v1/files?purpose=batch", { signal });
  for (const { input_file_id: id } of batches) names.set(id, id);
  for (const { id, filename } of data) names.set(id, filename);
}

function showProblem({ message, status }) {
  isRefused = ABSENT.includes(status) || status === 401; // 401: the page shows the key form
  byId("batches-on").hidden = ABSENT.includes(status);
  byId("batches-off").hidden = !ABSENT.includes(status);
  byId("batches-reason").textContent = message;
  showError(byId("batches-error"), isRefused ? "" : `${message} (retrying every second)`);
}

/** Upload a file, and let the server answer it. */
async function create(file) {
  if (byId("batch-form").ariaBusy) return;
  byId("batch-form").ariaBusy = "true";
  byId("batches-status").textContent = `Uploading ${file.name}…`;
  const done = await attempt(byId("batch-error"), async () => {
    const endpoint = await endpointOf(file);
    const form = new FormData();
    form.set("purpose", "batch");
    form.set("file", file);
    const { id } = await postJson("v1/files", form);
    names.set(id, file.name);
    const body = { input_file_id: id, endpoint, completion_window: "24h" };
    await postJson("v1/batches", body).catch(async (error) => {
      await request(`v1/files/${id}`, { method: "DELETE" }).catch(() => {}); // it takes up room
      throw error;
    });
    byId("batch-form").reset();
  });
  byId("batches-status").textContent = done ? `Created a batch of ${file.name}.` : "";
  byId("batch-form").ariaBusy = null;
}

/** Return the path that the first request of a file names; all have to name the same. */
async function endpointOf(file) {
  const [line] = (await file.slice(0, LONGEST_LINE).text()).split("\n", 1);
  try {
    const { url } = JSON.parse(line);
    if (typeof url === "string") return url;
  } catch {
    // the message below says it
  }
  const start = line.length > 80 ? `${line.slice(0, 80)}…` : line;
  throw new Error(`The first line of ${file.name} is no request with a url: ${start || "(empty)"}`);
}

/** Try an action, show why it failed, and look what has changed. Return whether it succeeded. */
async function attempt(place, action) {
  showError(place, "");
  try {
    await action();
    return true;
  } catch (error) {
    showError(place, error.message);
    return false;
  } finally {
    look();
  }
}

/** Update the list. Items that it has are not moved, so that the focus stays. */
function showAll(batches) {
  const list = byId("batch-list");
  for (const [i, batch] of batches.entries()) {
    if (!items.has(batch.id)) items.set(batch.id, newItem(batch));
    const item = items.get(batch.id);
    if (item !== list.children[i]) list.insertBefore(item, list.children[i] ?? null);
    fillItem(item, batch);
  }
  while (list.children.length > batches.length) list.lastElementChild.remove();
  byId("batches-none").hidden = batches.length > 0;
}

function newItem({ id, input_file_id: input, endpoint, created_at: seconds }) {
  const name = names.get(input);
  const [created, place] = [new Date(1000 * seconds), `batch-${id}`];
  const act = (action) => () => attempt(items.get(id).querySelector("[data-part=fault]"), action);
  const save = (kind) => {
    const ofFile = `${name.replace(/\.jsonl$/, "")}-${kind}.jsonl`;
    return act(async () => {
      const answer = await request(`v1/files/${items.get(id).dataset[kind]}/content`);
      download(ofFile, await answer.blob());
    });
  };
  const button = (onclick, says) => [{ onclick, "aria-label": `${says} of ${name}` }];
  const cancel = act(() => request(`v1/batches/${id}/cancel`, { method: "POST" }));
  const parts = {
    name: [{ id: place }, name],
    endpoint,
    created: [{ datetime: created.toISOString() }, created.toLocaleString()],
    progress: [{ "aria-labelledby": place }],
    answers: button(save("answers"), "Answers"),
    errors: button(save("errors"), "Errors"),
    cancel: [{ onclick: cancel, "aria-label": `Cancel ${name}` }],
  };
  return clone("batch-template", parts);
}

function fillItem(item, batch) {
  const { status, request_counts: counts, usage, errors } = batch;
  const part = (name) => item.querySelector(`[data-part="${name}"]`);
  const words = status.replaceAll("_", " ");
  const isNews = item.dataset.status && item.dataset.status !== status;
  Object.assign(item.dataset, {
    status,
    answers: batch.output_file_id ?? "",
    errors: batch.error_file_id ?? "",
  });
  const done = counts.completed + counts.failed;
  const ofTotal = `${formatCount(done)} of ${formatCount(counts.total)} done`;
  const failed = counts.failed ? `, ${formatCount(counts.failed)} with errors` : "";
  const tokens = usage.output_tokens ? ` · ${formatCount(usage.output_tokens)} new tokens` : "";
  part("status").textContent = words;
  part("counts").textContent = counts.total ? `${ofTotal}${failed}${tokens}` : "";
  Object.assign(part("progress"), { max: counts.total || 1, value: done });
  part("progress").hidden = ENDED.includes(status);
  const faults = (errors?.data ?? []).map(({ line, message }) =>
    line ? `line ${line}: ${message}` : message,
  );
  const rest = faults.splice(SHOWN_FAULTS).length;
  part("faults").textContent = [...faults, ...(rest ? [`and ${rest} more`] : [])].join("\n");
  part("faults").hidden = faults.length === 0;
  const { activeElement: focused } = document;
  part("answers").hidden = !batch.output_file_id;
  part("errors").hidden = !batch.error_file_id;
  part("cancel").hidden = !CANCELLABLE.includes(status);
  if (item.contains(focused) && !focused.checkVisibility()) item.focus();
  if (isNews) byId("batches-status").textContent = `${part("name").textContent}: ${words}.`;
}
