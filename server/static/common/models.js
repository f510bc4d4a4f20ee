// The models of the server, and the one that this page is about: "?model=name" in the address names
// it, or else it is the first.

import { getJson } from "./api.js";
import { byId, clone } from "./dom.js";

let all = []; // { id, kind, state, parent } of each that could be loaded
let chosen = "";
const REFRESH_MS = 1000; // while a model is being loaded

/** Load the list of models, offer them if there are several, and return the page's model card. */
export async function loadCard() {
  all = (await getJson("v1/models")).data;
  chosen = new URLSearchParams(location.search).get("model") ?? all[0].id;
  const isAlone = all.length === 1 && all[0].id === chosen;
  byId("chooser").hidden = isAlone;
  if (!isAlone) offer();
  const card = await cardOf(chosen);
  byId("served").textContent =
    `${isAlone ? `${chosen} · ` : ""}${card.precision} on ${card.device}`;
  return card;
}

/** Return the address of a GET route for a model. */
export const pathOf = (path, name) => `${path}?${new URLSearchParams({ model: name })}`;

/** Return everything about a model. Throws ApiError. */
export const cardOf = (name) => getJson(pathOf("model", name));

/** Return the kind of a model: chat, complete, translate, embed, rank or classify. */
export const kindOf = (name) => all.find(({ id }) => id === name)?.kind;

/** Return { id, kind } of the models that write text. */
export const writers = () =>
  all.filter(({ kind }) => ["chat", "complete", "translate"].includes(kind));

/** Return the link to a view, "#view?name=value", of a model. */
export const linkTo = (name, hash) => (name === chosen ? hash : `${pathOf("", name)}${hash}`);

/** Offer the list of models and adapters, which is read again whenever the chooser opens it. */
function offer() {
  const [button, list] = [byId("chooser"), byId("models")];
  button.textContent = chosen;
  button.ariaLabel = `Model: ${chosen}`;
  fill();
  list.onbeforetoggle = ({ newState }) => {
    const { left, bottom } = button.getBoundingClientRect();
    Object.assign(list.style, { left: `${left}px`, top: `${bottom + 4}px` });
    if (newState === "open") fill();
  };
  list.ontoggle = ({ newState }) => newState === "open" && refresh();
}

/** Show the list as it is known. Its links lead to the view that is shown. */
function fill() {
  const [view] = location.hash.split("?");
  const items = all.map(({ id, kind, state, parent }) =>
    clone("model-link", {
      link: [{ href: pathOf("", id) + view, "aria-current": id === chosen && "true" }],
      name: id,
      kind: [parent ? `adapter of ${parent}` : kind, ...(state === "ready" ? [] : [state])].join(
        ", ",
      ),
      progress: [{ hidden: state !== "loading", "aria-label": `${id} is being loaded` }],
    }),
  );
  byId("models").replaceChildren(...items);
}

/** Follow what is loaded while the list is open; what has not changed keeps the focus. */
async function refresh() {
  const isOpen = () => byId("models").matches(":popover-open");
  while (isOpen()) {
    const before = JSON.stringify(all);
    all = (await getJson("v1/models")).data;
    if (JSON.stringify(all) !== before && isOpen()) {
      const links = [...byId("models").querySelectorAll("a")];
      const focused = links.indexOf(document.activeElement);
      fill();
      byId("models").querySelectorAll("a")[focused]?.focus();
    }
    if (!all.some(({ state }) => state === "loading")) return;
    await new Promise((done) => setTimeout(done, REFRESH_MS));
  }
}
