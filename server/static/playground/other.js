// Column B of a comparison: that of the page's model, or of another one that writes text.

import { byId, make, showError } from "../common/dom.js";
import { cardOf, writers } from "../common/models.js";

export class Others {
  #columns = new Map(); // by model

  /** `own`: column B of the page's model. column(card) makes that of another. */
  constructor(own, column) {
    this.make = column;
    this.#columns.set(own.card.model, own);
    this.select = byId("other-model");
    this.select.append(...writers().map(({ id }) => make("option", {}, id)));
    this.select.value = own.card.model;
    byId("or-models").hidden = !this.#areSeveral;
  }

  get #areSeveral() {
    return this.select.length > 1;
  }

  /** Return a model's column, or the one that is shown if the server does not send its card. */
  async column(model, shown) {
    showError(byId("other-error"), "");
    try {
      if (!this.#columns.has(model)) this.#columns.set(model, this.make(await cardOf(model)));
    } catch (error) {
      showError(byId("other-error"), error.message);
    }
    const column = this.#columns.get(model) ?? shown;
    this.select.value = column.card.model;
    return column;
  }

  /** Offer the models where columns are compared; in a chat those with a chat template. */
  layOut(isComparing, isChat) {
    byId("other").hidden = !isComparing || !this.#areSeveral;
    for (const [i, { kind }] of writers().entries())
      this.select[i].disabled = isChat && kind !== "chat";
  }
}
