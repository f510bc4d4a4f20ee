// The live view: polls the server once a second while it is visible.

import { getJson, request } from "../common/api.js";
import { showBatch, startBatch } from "./batch.js";
import { Chart, formatFigure } from "./chart.js";
import { byId } from "../common/dom.js";
import { Figures } from "./figures.js";
import { formatCount } from "../common/format.js";
import { pause } from "../common/pause.js";

const EVERY_MS = 1000;
const UNPUBLISHED = [403, 404]; // responses of a gateway for routes that it does not publish

let figures;
let charts = [];
let isShown = false;
let isPaused = false;
let isRefused = false; // polling again would not help
let polling = null; // aborts polling

export function start(card) {
  figures = new Figures(card.model);
  startBatch(card.max_num_seqs);
  charts = [...byId("live").querySelectorAll("[data-series]")].map(
    (element) => new Chart(element, element.closest(".tile").querySelector("h3").textContent),
  );
  byId("live-slots").textContent = `of ${formatCount(card.max_num_seqs)}`;
  byId("live-pause").addEventListener("click", togglePause);
  document.addEventListener("visibilitychange", updatePolling);
  window.addEventListener("kvasir:new-key", () => setRefused(false));
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
function updatePolling() {
  const isWanted = isShown && !isPaused && !isRefused && !document.hidden;
  if (isWanted && polling === null) {
    polling = new AbortController();
    poll(polling.signal);
  } else if (!isWanted) {
    polling?.abort();
    polling = null;
  }
}

async function poll(signal) {
  while (!signal.aborted) {
    try {
      await update(signal);
      showMessage("");
    } catch (error) {
      if (!signal.aborted) showError(error);
    }
    await pause(EVERY_MS, signal).catch(() => {});
  }
}

function showError(error) {
  const isUnpublished = UNPUBLISHED.includes(error.status);
  const isFinal = isUnpublished || error.status === 401; // 401: the page shows the key form
  if (isUnpublished) showMessage(`The server's metrics are not published here: ${error.message}`);
  else showMessage(isFinal ? error.message : `${error.message} (retrying every second)`);
  if (isFinal) setRefused(true);
}

async function update(signal) {
  const text = await (await request("metrics", { signal })).text();
  figures.add(text, performance.now() / 1000);
  showFigures();
  showBatch(await getJson("debug/batch", { signal }));
}

function showFigures() {
  const now = figures.points.at(-1);
  for (const element of byId("live").querySelectorAll("[data-figure]")) {
    const { figure, unit } = element.dataset;
    element.textContent = formatFigure(now[figure], unit);
  }
  for (const chart of charts) chart.update(figures.points);
  const reasons = Object.entries(figures.rejected).filter(([, count]) => count > 0);
  const reasonTexts = reasons
    .map(([reason, count]) => `${formatCount(count)} ${reason}`)
    .join(", ");
  byId("live-reasons").textContent = reasonTexts
    ? `Since the server started: ${reasonTexts}.`
    : "None since the server started.";
  byId("live-empty").hidden = !figures.isUntouched;
}

/**
 * Show an alert. Screen readers announce each change of its text, so do not repeat the same text.
 */
function showMessage(message) {
  const element = byId("live-error");
  element.hidden = message === "";
  if (element.textContent !== message) element.textContent = message;
}
