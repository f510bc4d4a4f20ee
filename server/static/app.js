// The page: navigation between views, the API key, the theme, and the model card that views start
// from.

import * as batches from "./batches/batches.js";
import { ApiError, getKey, request, setKey } from "./common/api.js";
import { byId, showError } from "./common/dom.js";
import * as explorer from "./explorer/explorer.js";
import * as live from "./live/live.js";
import * as model from "./model/model.js";
import { loadCard } from "./common/models.js";
import { pause } from "./common/pause.js";
import * as playground from "./playground/playground.js";
import * as similarity from "./similarity/similarity.js";
import { load, save } from "./common/storage.js";

// Each view has start(card), called once. It may have show() and hide(), called when it appears and
// disappears. A view whose state is in the address, "#view?name=value", has open(params), called with
// URLSearchParams before show() when a link to a state is followed, and state(), which returns them.
// It fires "kvasir:state" on the window when its state has changed; only this module reads and writes
// location.hash. The parameters:
//
// attention: prompt, layer, head; token: the row to pin, from 0, if not the usual; focused=1, in
// place of layer and head: the head that is most focused at that row.
// without: the heads that are switched off.
// playground: prompt, or messages as JSON; each setting that was changed, and seed; branch: the path
// to the shown branch; when two columns are compared, the same of the second with the prefix "b.",
// and b.model if it is another model's.
const VIEWS = { playground, similarity, attention: explorer, live, batches, model };
const THEMES = ["system", "light", "dark"];
const RETRY_SECONDS = 2;

let shown = null;
let followed = ""; // the last location.hash that was shown
let views = []; // the names of the model's, once they are started

/** Return the names of the views of what the model does. */
function viewsOf({ config: { pooling } }) {
  const absent = pooling === null ? ["similarity"] : ["playground"];
  if (pooling?.labels.length) absent.push("similarity");
  return Object.keys(VIEWS).filter((name) => !absent.includes(name));
}

function show() {
  if (!views.length) return; // the views are not initialised yet
  followed = location.hash;
  const [requested, query] = followed.slice(1).split("?");
  // Other hashes, such as "#main", are places within the current view.
  const name = views.includes(requested || views[0]) ? requested || views[0] : (shown ?? views[0]);
  if (query) VIEWS[name].open?.(new URLSearchParams(query));
  if (name === shown) return;
  if (shown !== null) VIEWS[shown].hide?.();
  shown = name;
  for (const each of views) byId(each).hidden = each !== name;
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  VIEWS[name].show?.();
}

/** Write the state of the shown view into the address, so that a link reproduces it. */
function writeState() {
  const state = VIEWS[shown]?.state?.();
  if (!state || location.hash !== followed) return; // hashchange is still to come
  history.replaceState(null, "", `#${shown}?${state}`);
  followed = location.hash;
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme-name").textContent = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`); // narrow windows show only the name
  save("theme", theme);
  announceTheme();
}

function announceTheme() {
  window.dispatchEvent(new Event("kvasir:theme")); // canvases have to be redrawn
}

function nextTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
}

/** Start every view once the server has sent the model card. Show no view before that. */
async function start() {
  try {
    const card = await getCard();
    showFailure("");
    byId("key-forget").hidden = !getKey();
    document.title = `${card.model} · Kvasir`;
    const known = viewsOf(card);
    for (const link of document.querySelectorAll("header nav a"))
      link.hidden = !known.includes(link.hash.slice(1));
    for (const name of known) VIEWS[name].start(card);
    views = known;
    show();
  } catch (error) {
    showFailure(error.status === 401 ? "" : error.message); // 401: the key form is open
    if (!(error instanceof ApiError)) throw error;
  }
}

/** Get the model card. Retry while the server cannot be reached or is not ready. */
async function getCard() {
  for (;;) {
    try {
      return await loadCard();
    } catch (error) {
      const isTemporary = error instanceof ApiError && (error.status === 0 || error.status >= 500);
      if (!isTemporary) throw error;
      showFailure(`${error.message} (retrying)`);
      await pause(1000 * (error.retryAfter ?? RETRY_SECONDS));
    }
  }
}

const showFailure = (message) => showError(byId("failure"), message);

function askForKey() {
  byId("key-form").hidden = false;
  showError(byId("key-error"), getKey() && "The server rejected this key.");
  byId("key").select();
}

function useKey(event) {
  event.preventDefault();
  try {
    setKey(byId("key").value.trim());
  } catch (error) {
    return showError(byId("key-error"), error.message);
  }
  byId("key-form").hidden = true;
  byId("main").focus();
  if (views.length)
    window.dispatchEvent(new Event("kvasir:new-key")); // views repeat rejected requests
  else start();
}

/** Forget the key and everything that was loaded with it. */
function forgetKey() {
  setKey("");
  location.reload();
}

/**
 * Open a link to the API. Links cannot send a key, so if there is one, fetch the target and show
 * it.
 */
async function openWithKey(event) {
  const link = event.target.closest("a[data-api]");
  if (!link || !getKey()) return;
  event.preventDefault();
  try {
    const answer = await request(link.getAttribute("href"));
    location.assign(URL.createObjectURL(await answer.blob()));
  } catch (error) {
    showFailure(error.message);
  }
}

/** Submit the view's form by Ctrl+Enter, or Command+Enter. */
function submitByKey(event) {
  const form = event.target.closest("main > section, dialog")?.querySelector("form");
  if (!form || event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault(); // or a focused button would be pressed too
  form.requestSubmit();
}

setTheme(THEMES.find((theme) => theme === load("theme")) ?? "system");
byId("theme").addEventListener("click", nextTheme);
byId("key-form").addEventListener("submit", useKey);
byId("key-forget").addEventListener("click", forgetKey);
document.addEventListener("click", openWithKey);
document.addEventListener("keydown", submitByKey);
window.addEventListener("kvasir:key", askForKey);
window.addEventListener("hashchange", show);
window.addEventListener("kvasir:state", writeState);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announceTheme);
start();
