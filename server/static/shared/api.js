// The server's API: requests with the key, errors in the API's words, streams as events.

import { readEvents } from "./sse.js";
import { load, save } from "./storage.js";

/** What the server answered instead of a 2xx, or in a stream. `message` is the API's own, `retryAfter` in seconds. */
export class ApiError extends Error {
  constructor(message, status = 0, param = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

let key = `${load("key", "sessionStorage") ?? ""}`;

export const getKey = () => key;

/** Use a key, for as long as this tab lives; "" forgets it. Throws for one that no server can have. */
export function setKey(wanted) {
  if (/\s|\p{Cc}/u.test(wanted))
    throw new Error("A key has no space and no control character in it.");
  key = wanted;
  save("key", key, "sessionStorage");
}

/** The response to a GET, or to a POST of `body` as JSON. A 401 fires "kvasir:key" on the window. Throws ApiError. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${inBytes(key)}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = {
    headers,
    signal,
    method: body === undefined ? "GET" : "POST",
    body: body && JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached; is it still running?");
  }
  if (response.ok) return response;
  if (response.status === 401) window.dispatchEvent(new Event("kvasir:key"));
  throw errorOf(await response.text(), response);
}

/** What fetch sends as these characters' UTF-8: of a header it takes bytes only, a character each. */
const inBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

function errorOf(text, response) {
  try {
    const { error } = JSON.parse(text);
    return new ApiError(
      error.message,
      response.status,
      error.param,
      response.headers.get("retry-after"),
    );
  } catch {
    return new ApiError(`${response.status} ${response.statusText}`.trim(), response.status);
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const postJson = async (path, body, signal) =>
  (await request(path, { body, signal })).json();

/** The objects that a stream sends, until [DONE]. Throws ApiError for one that failed or broke off. */
export async function* stream(path, body, signal) {
  const response = await request(path, { body: { ...body, stream: true }, signal });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 0, event.error.param);
      yield event;
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // which is how a lost connection shows
  }
  throw new ApiError("the stream broke off before its end");
}
