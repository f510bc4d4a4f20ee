// The clipboard, and the dialog that shows a request as curl and Python.

import { getKey } from "./api.js";
import { byId, make } from "./dom.js";
import { curl, python } from "./snippets.js";

export function start() {
  for (const name of ["curl", "python"])
    byId(`copy-${name}`).addEventListener("click", () => copy(name));
  byId("copy-close").addEventListener("click", () => byId("copy-dialog").close());
}

/** Show a request { path, body } as curl and Python. */
export function open({ path, body }) {
  const here = document.baseURI.replace(/[?#].*$/, "");
  const hasKey = getKey() !== "";
  byId("as-curl").textContent = curl(new URL(path, here).href, body, hasKey);
  byId("as-python").textContent = python(new URL("v1", here).href, body, hasKey);
  byId("copied").textContent = "";
  byId("copy-dialog").showModal();
}

/** Save a Blob as a file, or a value as one of JSON. */
export function download(name, value) {
  const json = () => new Blob([JSON.stringify(value, null, 2)], { type: "application/json" });
  const blob = value instanceof Blob ? value : json();
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

async function copy(name) {
  byId("copied").textContent = await copyText(byId(`as-${name}`));
}

/** Copy an element's text, or select it if access is denied. Return a message for the user. */
export async function copyText(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return "Copied.";
  } catch {
    // only HTTPS and localhost pages may write to the clipboard
    getSelection().selectAllChildren(element);
    return "Selected: press Ctrl+C.";
  }
}
