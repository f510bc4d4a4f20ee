// The live view: asks the server once a second, as long as somebody can see it.

import { getJson, request } from "../shared/api.js";
import { showBatch, startBatch } from "./batch.js";
import { Chart, formatFigure } from "./chart.js";
import { byId } from "../shared/dom.js";
import { Figures } from "./figures.js";
import { formatCount } from "../shared/format.js";
import { pause } from "../shared/pause.js";

const EVERY_MS = 1000;
const UNPUBLISHED = [403, 404]; // as a gateway answers for what it keeps to itself

const figures = new Figures();
let charts = [];
let isShown = false;
let isPaused = false;
let isRefused = false; // asking again would change nothing
let polling = null; // what stops it

export function start(card) {
  startBatch(card.max_num_seqs);
  charts = [...byId("live").querySelectorAll("[data-series]")].map(
    (element) => new Chart(element, element.closest(".tile").querySelector("h3").textContent),
  );
  byId("live-rows").textContent = `of ${formatCount(card.max_num_seqs)}`;
  byId("live-pause").addEventListener("click", togglePause);
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("kvasir:new-key", () => refuse(false));
}

export function show() {
  isShown = true;
  refuse(false);
}

export function hide() {
  isShown = false;
  follow();
}

function togglePause() {
  isPaused = !isPaused;
  byId("live-pause").textContent = isPaused ? "Resume" : "Pause";
  follow();
}

function refuse(is) {
  isRefused = is;
  byId("live-pause").hidden = is;
  follow();
}

/** Poll exactly while it is of use. */
function follow() {
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
      await look(signal);
      tell("");
    } catch (error) {
      if (!signal.aborted) fail(error);
    }
    await pause(EVERY_MS, signal).catch(() => {});
  }
}

function fail(error) {
  const isUnpublished = UNPUBLISHED.includes(error.status);
  const isFinal = isUnpublished || error.status === 401; // then the page asks for the key
  if (isUnpublished) tell(`The server's figures are not published here: ${error.message}`);
  else tell(isFinal ? error.message : `${error.message} (trying again every second)`);
  if (isFinal) refuse(true);
}

async function look(signal) {
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
  const told = reasons.map(([reason, count]) => `${formatCount(count)} ${reason}`).join(", ");
  byId("live-reasons").textContent = told ? `Since the start: ${told}.` : "None since the start.";
  byId("live-empty").hidden = !figures.isUntouched;
}

/** An alert is read out when its text changes, so the same one is said once. */
function tell(message) {
  const element = byId("live-error");
  element.hidden = message === "";
  if (element.textContent !== message) element.textContent = message;
}
