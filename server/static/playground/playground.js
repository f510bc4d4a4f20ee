// The playground: a prompt or a conversation, one column or two, and what the buttons do.

import { Conversation } from "./chat.js";
import * as copying from "../shared/copying.js";
import { byId } from "../shared/dom.js";
import { Run } from "./run.js";
import { load, save as store } from "../shared/storage.js";
import { welcome } from "./welcome.js";

let stored; // the name of what is kept: of each model apart
let runs;
let conversation;
let hasChat;
let sending = Promise.resolve(); // never rejected
let answered = null; // the input of what is shown
let latest = null;

const isChat = () => hasChat && byId("mode-chat").checked;
const isComparing = () => byId("compare").checked;
const shownRuns = () => (isComparing() ? runs : runs.slice(0, 1));

export function start(card) {
  hasChat = card.has_chat_template;
  stored = `playground-${card.model}`;
  welcome(card);
  runs = ["a", "b"].map((name) => new Run(name, card, changed));
  conversation = new Conversation(save);
  for (const run of runs) {
    byId("runs").append(run.element);
    run.part("copy").addEventListener("click", () => copy(run));
    run.part("keep").addEventListener("click", () => keep(run).focus());
  }
  restore();
  layOut();
  wire();
}

function wire() {
  byId("prompt-form").addEventListener("submit", (event) => act(event, generate));
  byId("stop").addEventListener("click", stop);
  byId("regenerate").addEventListener("click", regenerate);
  byId("clear").addEventListener("click", clear);
  byId("shaded").addEventListener("change", changed);
  for (const id of ["mode-completion", "mode-chat"])
    byId(id).addEventListener("change", changeMode);
  byId("compare").addEventListener("change", changed);
  byId("prompt-form").addEventListener("input", save);
  byId("message").addEventListener("input", () => byId("message").setCustomValidity(""));
  byId("examples").addEventListener("click", useExample);
  byId("playground").addEventListener("keydown", (event) => {
    const isOfPage = !event.target.closest("dialog");
    if (isOfPage && event.key === "Enter" && (event.ctrlKey || event.metaKey)) act(event, generate);
  });
  copying.start();
}

function act(event, action) {
  event.preventDefault();
  action();
}

const generate = () =>
  afterStop(() => {
    if (!areSettingsRight() || (isChat() && !hasMessage())) return null;
    if (isChat()) goOn();
    return send(input());
  });

const regenerate = () =>
  afterStop(() => {
    for (const { settings } of shownRuns()) settings.nextSeed();
    return areSettingsRight() ? send(answered) : null;
  });

const areSettingsRight = () => shownRuns().every((run) => run.settings.fields() !== null);

function hasMessage() {
  byId("message").setCustomValidity(conversation.isEmpty ? "Write a message first." : "");
  return byId("message").reportValidity();
}

/** In a conversation, what is shown is the answer to the last message: before the next one it becomes a turn. */
function goOn() {
  if (byId("message").value && runs[0].hasAnswer) keep(runs[0]);
  conversation.take();
}

/** Both columns get the same seed, so that what differs comes from their settings. */
async function send(what) {
  answered = what;
  const isAgain = document.activeElement === byId("regenerate");
  const seed = Math.floor(Math.random() * 2 ** 32);
  keepFocus(byId("stop"), () => {
    sending = Promise.all(shownRuns().map((run) => run.send(run.request(what, seed))));
    busy(true);
  });
  runs[0].reveal();
  save();
  say(`Done: ${(await sending).join(", and ")}.`);
  keepFocus(
    byId(isAgain && shownRuns().some((run) => run.hasAnswer) ? "regenerate" : "generate"),
    () => busy(false),
  );
  save();
}

/** Where a change disables, hides or removes what has the focus, `next` gets it. */
function keepFocus(next, change) {
  const had = document.activeElement;
  change();
  if (had.disabled || !had.checkVisibility()) next.focus({ preventScroll: true }); // the answer stays in sight
}

const input = () =>
  isChat() ? { messages: conversation.messages() } : { prompt: byId("prompt").value };

const clear = () =>
  afterStop(() => {
    if (isChat()) conversation.clear();
    else byId("prompt").value = "";
    forget();
    byId(isChat() ? "message" : "prompt").focus();
  });

const changeMode = () =>
  afterStop(() => {
    if (isAnswerOfChat()) keep(runs[0]);
    else forget();
  });

const isAnswerOfChat = () => runs[0].hasAnswer && "messages" in answered;

function forget() {
  for (const run of runs) run.clear();
  changed();
}

function stop() {
  for (const run of runs) run.stop();
}

/** Do it once what runs has ended: what came late would be shown as the next one's. Of several, do the last. */
async function afterStop(action) {
  const own = (latest = action);
  stop();
  await sending;
  if (latest === own) await action();
}

/** What a column shows becomes a turn; returns where that can be edited. */
function keep(run) {
  const turn = conversation.add("assistant", run.tokens.text);
  forget();
  return turn;
}

/** What was sent for the answer that is shown; before there is any, what would be. */
function copy(run) {
  const request = run.sent ?? run.request(input());
  if (request) copying.open(request);
}

function busy(isBusy) {
  if (isBusy) say("Generating.");
  byId("stop").disabled = !isBusy;
  layOut();
}

const say = (what) => {
  byId("generation-status").textContent = what;
};

function useExample(event) {
  const example = event.target.closest("button");
  if (!example) return;
  byId("prompt").value = example.textContent;
  save();
  byId("prompt").focus();
}

function changed() {
  layOut();
  save();
}

function layOut() {
  const section = byId("playground");
  section.classList.toggle("comparing", isComparing());
  section.classList.toggle("unshaded", !byId("shaded").checked);
  byId("modes").hidden = !hasChat;
  byId("no-chat").hidden = hasChat;
  byId("completion-input").hidden = isChat();
  byId("chat-input").hidden = !isChat();
  runs[1].element.hidden = !isComparing();
  runs[0].settings.markDifferences(isComparing() ? runs[1].settings : null);
  runs[1].settings.markDifferences(isComparing() ? runs[0].settings : null);
  byId("regenerate").disabled = !shownRuns().some((run) => run.hasAnswer);
  for (const run of runs) run.part("keep").hidden = !isChat() || run.isRunning || !run.hasAnswer;
}

function save() {
  store(stored, {
    prompt: byId("prompt").value,
    chat: hasChat ? byId("mode-chat").checked : undefined,
    compare: isComparing(),
    shaded: byId("shaded").checked,
    conversation: conversation.state(isAnswerOfChat() ? runs[0].tokens.text : ""),
    settings: runs.map((run) => run.settings.state()),
  });
}

function restore() {
  try {
    fill(load(stored) ?? {});
  } catch {
    // kept by another version of this page
    fill({});
  }
}

function fill(kept) {
  byId("prompt").value = kept.prompt ?? byId("examples").querySelector("button").textContent;
  byId(hasChat && (kept.chat ?? true) ? "mode-chat" : "mode-completion").checked = true;
  byId("compare").checked = kept.compare ?? false;
  byId("shaded").checked = kept.shaded ?? true;
  for (const [i, run] of runs.entries()) run.settings.restore(kept.settings?.[i]);
  conversation.restore(kept.conversation ?? { message: byId("message").defaultValue });
}
