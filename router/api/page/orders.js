// Orders of operators, with the result as a short message.

import { order } from "./asking.js";
import { toast } from "./draw.js";

// Returns the body of an order for a model. An order of a worker without a known release goes to the only model.
export const forModel = (release, body = {}) => (release ? { ...body, model: release } : body);

export async function give(done, path, body) {
  try {
    await order(path, body);
    toast(done);
  } catch (error) {
    toast(error.status === 401 || error.status === 403 ? `Refused: ${error.message}` : `Failed: ${error.message}`);
  }
}
