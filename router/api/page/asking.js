// Requests to the router, with the user's API key.

const KEY = "baton-api-key", TIMEOUT_MS = 10000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) || "";
export const keep = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));
export const headers = (more = {}) => (key() ? { Authorization: `Bearer ${key()}`, ...more } : more);

// Returns the error of a failed response, with the message of its body.
export async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  return new Refused(answer.status, body?.error?.message || `HTTP status ${answer.status}`);
}

export async function ask(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

// An order may take as long as a worker needs to be free.
export async function order(path, body) {
  const answer = await fetch(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}
