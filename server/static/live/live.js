// The live view: polls the server once a second while it is visible.

import { getJson, postJson, request } from "../common/api.js";
import { showBatch, startBatch } from "./batch.js";
import { Chart, formatFigure } from "./chart.js";
import { byId, present, showError } from "../common/dom.js";
import { Figures } from "./figures.js";
import { formatCount } from "../common/format.js";
import { pathOf } from "../common/models.js";
import { Repeated } from "../common/pause.js";

const EVERY_MS = 1000;
const SENT_AT_ONCE = 16;
const UNPUBLISHED = [403, 404]; // responses of a gateway for routes that it does not publish

const showMessage = (message) => showError(byId("live-error"), message);

let figures;
let charts = [];
let canSend = false;
let isShown = false;
let isPaused = false;
let isRefused = false; // polling again would not help
let refusal = ""; // of the requests that were sent; shown until others are sent
let polling;
let batch; // the path of the batch
let readAt = null; // when the shown figures were read

export function start(card) {
  figures = new Figures(card.model);
  batch = pathOf("debug/batch", card.model);
  polling = new Repeated(poll, EVERY_MS);
  startBatch(card.max_num_seqs);
  present(byId("live"), card.config);
  charts = [...byId("live").querySelectorAll("[data-series]")].map(
    (element) => new Chart(element, element.closest(".tile").querySelector("h3").textContent),
  );
  byId("live-slots").textContent = `of ${formatCount(card.max_num_seqs)}`;
  byId("live-pause").addEventListener("click", togglePause);
  byId("live-send").addEventListener("click", () => sendRequests(card));
  canSend = card.config.pooling === null;
  document.addEventListener("visibilitychange", updatePolling);
  window.addEventListener("kvasir:new-key", () => setRefused(false));
}

/** Send requests as one, because browsers hold few connections to a server, to see a batch. */
async function sendRequests({ model, examples, max_model_len: most }) {
  byId("live-send").hidden = true;
  const prompt = examples[0] ?? "Once upon a time";
  const length = { max_tokens: Math.min(512, most >> 1), ignore_eos: true };
  const body = { model, prompt, ...length, n: SENT_AT_ONCE, seed: 0 };
  showMessage((refusal = ""));
  try {
    await postJson("v1/completions", body);
  } catch (error) {
    showMessage((refusal = error.message));
  }
}

export function show() {
  isShown = true;
  setRefused(false);
}

export function hide() {
  isShown = false;
  updatePolling();
}

function togglePause() {
  isPaused = !isPaused;
  byId("live-pause").textContent = isPaused ? "Resume" : "Pause";
  updatePolling();
}

function setRefused(is) {
  isRefused = is;
  byId("live-pause").hidden = is;
  updatePolling();
}

/** Start or stop polling, so that it runs exactly while it is useful. */
const updatePolling = () => polling.want(isShown && !isPaused && !isRefused && !document.hidden);

async function poll(signal) {
  try {
    await update(signal);
    showMessage(refusal);
  } catch (error) {
    if (!signal.aborted) showProblem(error);
  }
}

function showProblem(error) {
  const { message, status } = error;
  const isUnpublished = UNPUBLISHED.includes(status);
  const isFinal = isUnpublished || status === 401; // 401: the page shows the key form
  const asOf = readAt ? `; the figures are as of ${readAt.toLocaleTimeString()}` : "";
  if (isUnpublished) showMessage(`The server's metrics are not published here: ${message}`);
  else showMessage(isFinal ? message : `${message} (retrying every second)${asOf}`);
  if (isFinal) setRefused(true);
}

async function update(signal) {
  const text = await (await request("metrics", { signal })).text();
  figures.add(text, performance.now() / 1000);
  showFigures();
  showBatch(await getJson(batch, { signal }));
  readAt = new Date();
}

function showFigures() {
  const now = figures.points.at(-1);
  for (const element of byId("live").querySelectorAll("[data-figure]"))
    element.textContent = formatFigure(now[element.dataset.figure], element.dataset.unit);
  for (const chart of charts) chart.update(figures.points);
  const reasons = Object.entries(figures.rejected)
    .filter(([, count]) => count > 0)
    .map(([reason, count]) => `${formatCount(count)} ${reason}`);
  byId("live-reasons").textContent = reasons.length
    ? `Since the server started: ${reasons.join(", ")}.`
    : "None since the server started.";
  byId("live-send").hidden = !canSend || now.running + now.waiting > 0;
}
