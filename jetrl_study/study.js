"use strict";
// A click on an arm in the legend hides or shows it in every figure; a double click shows it alone, or all again.
const main = document.getElementById("main"), arms = [...document.querySelectorAll("#legend button")];
const isShown = (arm) => arm.getAttribute("aria-pressed") === "true";

function show(arm, shown) {
  main.classList.toggle(`off${arm.dataset.arm}`, !shown);
  arm.setAttribute("aria-pressed", String(shown));
}

for (const arm of arms) {
  arm.addEventListener("click", () => show(arm, !isShown(arm)));
  arm.addEventListener("dblclick", () => {
    const alone = arms.every((other) => isShown(other) === (other === arm));
    for (const other of arms) show(other, alone || other === arm);
  });
}
