// The models of the server, and the one that this page is about: "?model=name" in the address names
// it, or else it is the first.

import { getJson } from "./api.js";
import { byId, clone } from "./dom.js";

let all = []; // { id, kind, state } of each that could be loaded
let chosen = "";

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

/** Fill the list of models that the chooser opens. Its links lead to the view that is shown. */
function offer() {
  const [button, list] = [byId("chooser"), byId("models")];
  button.textContent = chosen;
  button.ariaLabel = `Model: ${chosen}`;
  const items = all.map(({ id, kind, state }) =>
    clone("model-link", {
      link: [{ "aria-current": id === chosen && "true" }],
      name: id,
      kind: state === "ready" ? kind : `${kind}, ${state}`,
    }),
  );
  list.replaceChildren(...items);
  list.onbeforetoggle = () => {
    const [view] = location.hash.split("?");
    items.forEach((item, i) => (item.firstElementChild.href = pathOf("", all[i].id) + view));
    const { left, bottom } = button.getBoundingClientRect();
    Object.assign(list.style, { left: `${left}px`, top: `${bottom + 4}px` });
  };
}
