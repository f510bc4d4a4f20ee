// The page: which view is shown, the key, the theme, and the model's card, which every view starts from.

import { ApiError, getJson, getKey, request, setKey } from "./shared/api.js";
import { byId } from "./shared/dom.js";
import * as explorer from "./explorer/explorer.js";
import * as live from "./live/live.js";
import * as model from "./model/model.js";
import { pause } from "./shared/pause.js";
import * as playground from "./playground/playground.js";
import { load, save } from "./shared/storage.js";

// Each view has start(card), called once, and may have show() and hide(), called when it comes and goes.
const VIEWS = { playground, attention: explorer, live, model };
const THEMES = ["system", "light", "dark"];
const RETRY_SECONDS = 2;

let shown = null;
let started = false;

function show() {
  if (!started) return; // nothing would answer there yet
  const wanted = location.hash.slice(1) || "playground";
  const name = Object.hasOwn(VIEWS, wanted) ? wanted : (shown ?? "playground"); // "#main" is a place in any view
  if (name === shown) return;
  if (shown !== null) VIEWS[shown].hide?.();
  shown = name;
  for (const each of Object.keys(VIEWS)) byId(each).hidden = each !== name;
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  VIEWS[name].show?.();
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme-name").textContent = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`); // a narrow window has room for the name alone
  save("theme", theme);
  sayTheme();
}

function sayTheme() {
  window.dispatchEvent(new Event("kvasir:theme")); // what is drawn on a canvas is drawn again
}

function nextTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
}

/** Start every view, as soon as the server tells what it serves: before that, none is shown. */
async function start() {
  try {
    const card = await getCard();
    byId("failure").hidden = true;
    started = true;
    byId("key-forget").hidden = !getKey();
    byId("served").textContent = `${card.model} · ${card.precision} on ${card.device}`;
    document.title = `${card.model} · Kvasir`;
    for (const view of Object.values(VIEWS)) view.start(card);
    show();
  } catch (error) {
    byId("failure").hidden = true;
    if (error.status === 401) return; // the key is asked for
    fail(error.message);
    throw error;
  }
}

/** From a server that cannot be reached or cannot answer yet: again until it does. */
async function getCard() {
  for (;;) {
    try {
      return await getJson("model");
    } catch (error) {
      const isPassing = error instanceof ApiError && (error.status === 0 || error.status >= 500);
      if (!isPassing) throw error;
      fail(`${error.message} (trying again until it answers)`);
      await pause(1000 * (error.retryAfter ?? RETRY_SECONDS));
    }
  }
}

/** An alert is read out when its text changes, so the same one is said once. */
function fail(message) {
  byId("failure").hidden = false;
  if (byId("failure").textContent !== message) byId("failure").textContent = message;
}

function askForKey() {
  sayOfKey(getKey() && "The server does not know this key.");
  byId("key-form").hidden = false;
  byId("key").select();
}

function sayOfKey(what) {
  byId("key-error").hidden = what === "";
  byId("key-error").textContent = what;
}

function useKey(event) {
  event.preventDefault();
  try {
    setKey(byId("key").value.trim());
  } catch (error) {
    return sayOfKey(error.message);
  }
  byId("key-form").hidden = true;
  byId("main").focus();
  if (started)
    window.dispatchEvent(new Event("kvasir:new-key")); // what was refused is asked again
  else start();
}

/** And all that was shown with it. */
function forgetKey() {
  setKey("");
  location.reload();
}

/** A link sends no key: where there is one, what it leads to is fetched, and shown as it came. */
async function followWithKey(event) {
  const link = event.target.closest("a[data-api]");
  if (!link || !getKey()) return;
  event.preventDefault();
  try {
    const answer = await request(link.getAttribute("href"));
    location.assign(URL.createObjectURL(await answer.blob()));
  } catch (error) {
    fail(error.message);
  }
}

setTheme(THEMES.find((theme) => theme === load("theme")) ?? "system");
byId("theme").addEventListener("click", nextTheme);
byId("key-form").addEventListener("submit", useKey);
byId("key-forget").addEventListener("click", forgetKey);
document.addEventListener("click", followWithKey);
window.addEventListener("kvasir:key", askForKey);
window.addEventListener("hashchange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", sayTheme);
start();
