// The columns of the playground: one answer or, to compare, two, of two settings or two models.

import { byId, make, showError } from "../common/dom.js";
import { cardOf, writers } from "../common/models.js";

export class Columns {
  #ofB = new Map(); // column B by model

  /** makeRun(name, card) makes a column, a Run. Calls changed() after each change of them. */
  constructor(card, makeRun, changed) {
    Object.assign(this, { makeRun, changed });
    this.runs = ["a", "b"].map((name) => makeRun(name, card));
    this.#ofB.set(card.model, this.runs[1]);
    byId("runs").append(...this.runs.map((run) => run.element));
    byId("other-model").append(...writers().map(({ id }) => make("option", {}, id)));
    byId("other-model").value = card.model;
    byId("or-models").hidden = writers().length < 2;
    byId("compare").addEventListener("change", () => this.#start());
  }

  get areCompared() {
    return byId("compare").checked;
  }

  get areOfTwoModels() {
    return this.runs[0].card.model !== this.runs[1].card.model;
  }

  get shown() {
    return this.areCompared ? this.runs : this.runs.slice(0, 1);
  }

  /** Copy the settings of A to B, if B has none, with one difference, the temperature. */
  #start() {
    const [settings, others] = this.runs.map((run) => run.settings.state());
    const temperature = settings.temperature === "0" ? "1" : "0";
    if (this.areCompared && !Object.keys(others).length)
      this.runs[1].settings.restore({ ...settings, temperature });
    this.changed();
  }

  /**
   * Let a model answer in column B, with these settings. If the server does not send its card, the
   * column stays. Never rejects.
   */
  async compareWith(model, settings = this.runs[0].settings.state()) {
    showError(byId("other-error"), "");
    const [, before] = this.runs;
    try {
      if (!this.#ofB.has(model)) this.#ofB.set(model, this.makeRun("b", await cardOf(model)));
    } catch (error) {
      showError(byId("other-error"), error.message);
    }
    const run = this.#ofB.get(model) ?? before;
    if (run !== before) run.clear(); // of an answer to an earlier prompt
    run.settings.restore(settings);
    before.element.replaceWith(run.element);
    this.runs[1] = run;
    byId("other-model").value = run.card.model;
    this.changed();
  }

  /** Offer models for B: in a chat those with a chat template. Mark what differs. */
  layOut(isChat) {
    const { classList } = byId("playground");
    classList.toggle("comparing", this.areCompared);
    classList.toggle("two-models", this.areOfTwoModels);
    byId("other").hidden = !this.areCompared || writers().length < 2;
    for (const [i, { kind }] of writers().entries())
      byId("other-model")[i].disabled = isChat && kind !== "chat";
    const [a, b] = this.runs;
    b.element.hidden = !this.areCompared;
    a.markDifferences(this.areCompared ? b : a);
    b.markDifferences(this.areCompared ? a : b);
  }
}
