// The API reference, /docs: the server's own openapi.json as a page, a fold for each route and each
// object.

import { getJson, setKey } from "./common/api.js";
import { byId, make, showError } from "./common/dom.js";
import { load } from "./common/storage.js";

const NAME = /[^/]+$/; // of a schema, in a reference to it

/** Return a type in words and links. */
function kindOf(schema) {
  const name = schema.$ref?.match(NAME)[0];
  if (name) return [make("a", { href: `#${name}` }, name)];
  const kinds = (schema.anyOf ?? schema.oneOf ?? []).filter((one) => one.type !== "null");
  if (kinds.length) return kinds.flatMap((one, i) => [...(i ? [" or "] : []), ...kindOf(one)]);
  const values = schema.enum ?? ("const" in schema ? [schema.const] : []);
  if (values.length) return [values.map((one) => JSON.stringify(one)).join(", ")];
  if (schema.type === "array") return ["list of ", ...kindOf(schema.items ?? {})];
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const bounds = [
    least === undefined ? "" : ` ${"minimum" in schema ? "≥" : ">"} ${least}`,
    schema.maximum === undefined ? "" : ` ≤ ${schema.maximum}`,
  ];
  return [`${schema.type ?? "any"}${bounds.join("")}`];
}

function table(head, rows) {
  const cells = (tag, row) => row.map((cell) => make(tag, {}, ...[cell].flat()));
  const body = rows.map((row) => make("tr", {}, ...cells("td", row)));
  const heading = make("thead", {}, make("tr", {}, ...cells("th", head)));
  return make("div", { class: "sideways" }, make("table", {}, heading, make("tbody", {}, ...body)));
}

const code = (text) => make("code", {}, text);

/** Return the table of an object's fields; of other schemas a line with their kind. */
function fieldsOf(schema) {
  const fields = Object.entries(schema.properties ?? {});
  if (!fields.length) return make("p", {}, ...kindOf(schema));
  const rows = fields.map(([name, field]) => [
    code(name),
    kindOf(field),
    schema.required?.includes(name) ? "required" : JSON.stringify(field.default ?? "").slice(0, 80),
    field.description ?? "",
  ]);
  return table(["field", "type", "default", ""], rows);
}

/** Return a fold; its content is made when it is first opened. */
function fold(id, title, about, content) {
  const summary = make("summary", {}, code(title), " ", make("span", { class: "quiet" }, about));
  const made = make("details", { id, class: "card" }, summary);
  made.addEventListener("toggle", () => made.append(...content()), { once: true });
  return made;
}

function route(path, method, operation) {
  const contents = [];
  const parameters = (operation.parameters ?? []).map((one) => [
    code(one.name),
    one.in,
    kindOf(one.schema),
    one.description ?? "",
  ]);
  const answers = Object.entries(operation.responses).flatMap(([status, answer]) => {
    const kinds = Object.entries(answer.content ?? { "": {} });
    return kinds.map(([type, { schema }]) => [
      status,
      type,
      schema ? kindOf(schema) : "",
      answer.description,
    ]);
  });
  return fold(operation.operationId, `${method.toUpperCase()} ${path}`, operation.summary, () => {
    if (parameters.length) contents.push(table(["parameter", "in", "type", ""], parameters));
    for (const [type, { schema }] of Object.entries(operation.requestBody?.content ?? {}))
      contents.push(make("p", {}, `Body, ${type}: `, ...kindOf(schema)));
    return [...contents, table(["answer", "content", "type", ""], answers)];
  });
}

/** Open the fold that the address names. */
function follow() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named?.tagName !== "DETAILS") return;
  named.open = true;
  named.scrollIntoView();
}

function filter() {
  const wanted = byId("filter").value.toLowerCase();
  for (const each of document.querySelectorAll("details"))
    each.hidden = !each.firstElementChild.textContent.toLowerCase().includes(wanted);
}

async function start() {
  try {
    const api = await getJson("openapi.json");
    byId("version").textContent = `API of version ${api.info.version}`;
    for (const [path, operations] of Object.entries(api.paths))
      for (const [method, operation] of Object.entries(operations))
        byId("routes").append(route(path, method, operation));
    for (const [name, schema] of Object.entries(api.components.schemas).sort())
      byId("objects").append(fold(name, name, schema.description ?? "", () => [fieldsOf(schema)]));
    byId("operations").hidden = false;
    byId("key-form").hidden = true;
    showError(byId("failure"), "");
    follow();
  } catch (error) {
    byId("key-form").hidden = error.status !== 401;
    showError(byId("failure"), error.message);
  }
}

const theme = load("theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
byId("filter").addEventListener("input", filter);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  start();
});
window.addEventListener("hashchange", follow);
start();
