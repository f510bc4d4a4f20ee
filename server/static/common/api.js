// Client of the server's API: requests with the API key, errors with the API's message, streams as
// events.

import { readEvents } from "./sse.js";
import { load, save } from "./storage.js";

/** An error response, or an error event of a stream. `retryAfter` is in seconds. */
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

/** Use a key until this tab is closed; "" removes it. Throws an Error for a malformed key. */
export function setKey(wanted) {
  if (/\s|\p{Cc}/u.test(wanted))
    throw new Error("A key must not contain spaces or control characters.");
  key = wanted;
  save("key", key, "sessionStorage");
}

/**
 * Send a GET, or a POST of `body`, a form or else JSON, and return the response. Throws ApiError.
 *
 * A 401 also fires "kvasir:key" on the window.
 */
export async function request(path, { body, signal, method = body ? "POST" : "GET" } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${toHeaderBytes(key)}`;
  const isJson = body && !(body instanceof FormData);
  if (isJson) headers["content-type"] = "application/json";
  const sent = { headers, signal, method, body: isJson ? JSON.stringify(body) : body };
  const response = await fetch(path, sent).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError("cannot reach the server; is it running?");
  });
  if (response.ok) return response;
  if (response.status === 401) window.dispatchEvent(new Event("kvasir:key"));
  throw parseError(await response.text(), response);
}

/** Encode a text for a header: fetch accepts only characters that stand for one byte each. */
const toHeaderBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

function parseError(text, response) {
  try {
    const { message, param } = JSON.parse(text).error;
    return new ApiError(message, response.status, param, response.headers.get("retry-after"));
  } catch {
    return new ApiError(`${response.status} ${response.statusText}`.trim(), response.status);
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const postJson = async (path, body, signal) =>
  (await request(path, { body, signal })).json();

/** Yield the objects of a stream until [DONE]. Throws ApiError if it fails or is cut off. */
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
    if (!(error instanceof TypeError)) throw error; // a lost connection is a TypeError
  }
  throw new ApiError("the connection was lost before the stream ended");
}
