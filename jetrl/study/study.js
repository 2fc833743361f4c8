"use strict";
// A click on an arm in the legend hides or shows it in every figure.
for (const button of document.querySelectorAll("#legend button")) {
  button.addEventListener("click", () => {
    const hidden = document.getElementById("main").classList.toggle(`off${button.dataset.arm}`);
    button.setAttribute("aria-pressed", String(!hidden));
  });
}
