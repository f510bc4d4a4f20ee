// The live view: asks the server once a second, as long as somebody can see it.

import { getJson, request } from "./api.js";
import { showBatch, startBatch } from "./batch.js";
import { Chart, formatFigure } from "./chart.js";
import { byId } from "./dom.js";
import { Figures } from "./figures.js";
import { formatCount } from "./format.js";

const EVERY_MS = 1000;

const figures = new Figures();
let charts = [];
let isShown = false;
let isPaused = false;
let polling = null; // what stops it

export function start(card) {
  startBatch(card.max_num_seqs);
  charts = [...byId("live").querySelectorAll("[data-series]")].map(
    (element) => new Chart(element, element.closest(".tile").querySelector("h3").textContent),
  );
  byId("live-rows").textContent = `of ${formatCount(card.max_num_seqs)}`;
  byId("live-pause").addEventListener("click", () => pause(!isPaused));
  document.addEventListener("visibilitychange", follow);
}

export function show() {
  isShown = true;
  follow();
}

export function hide() {
  isShown = false;
  follow();
}

function pause(wanted) {
  isPaused = wanted;
  byId("live-pause").textContent = isPaused ? "Resume" : "Pause";
  follow();
}

/** Poll exactly while it is of use. */
function follow() {
  const isWanted = isShown && !isPaused && !document.hidden;
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
      if (signal.aborted) return;
      if (error.status === 401) pause(true); // the page asks for the key
      tell(`${error.message}${isPaused ? "" : " Trying again every second."}`);
    }
    await wait(EVERY_MS, signal);
  }
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

function wait(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
