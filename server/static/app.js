// The page: which view is shown, the key, the theme, and the model's card, which every view starts from.

import { getJson, getKey, setKey } from "./api.js";
import { byId } from "./dom.js";
import * as explorer from "./explorer.js";
import * as live from "./live.js";
import * as model from "./model.js";
import * as playground from "./playground.js";

// Each view has start(card), called once, and may have show() and hide(), called when it comes and goes.
const VIEWS = { playground, attention: explorer, live, model };
const THEMES = ["system", "light", "dark"];
const STORED_THEME = "kvasir-theme";

let shown = null;
let started = false;

function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : shown ?? "playground";
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
  byId("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem(STORED_THEME, theme);
  sayTheme();
}

function sayTheme() {
  window.dispatchEvent(new Event("kvasir:theme")); // what is drawn on a canvas is drawn again
}

function nextTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
}

/** Start every view, as soon as the server tells what it serves. */
async function start() {
  byId("failure").hidden = true;
  try {
    const card = await getJson("model");
    started = true;
    byId("served").textContent = `${card.model} · ${card.precision} on ${card.device}`;
    document.title = `${card.model} · Kvasir`;
    for (const view of Object.values(VIEWS)) view.start(card);
    window.addEventListener("hashchange", show);
    show();
  } catch (error) {
    if (error.status === 401) return; // the key is asked for
    byId("failure").hidden = false;
    byId("failure").textContent = error.message;
    throw error;
  }
}

function askForKey() {
  byId("key-error").hidden = !getKey();
  byId("key-error").textContent = "The server does not know this key.";
  byId("key-form").hidden = false;
  byId("key").select();
}

function useKey(event) {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key-form").hidden = true;
  if (!started) start();
}

setTheme(THEMES.find((theme) => theme === localStorage.getItem(STORED_THEME)) ?? "system");
byId("theme").addEventListener("click", nextTheme);
byId("key-form").addEventListener("submit", useKey);
window.addEventListener("kvasir:key", askForKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", sayTheme);
start();
