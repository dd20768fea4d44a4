"""The English words about Sojourn and the ideas of training."""

from __future__ import annotations

from sojourn.data.builtin.kinds.training import TrainingWords
from sojourn.data.builtin.weave import beat, plots

TRAINING = TrainingWords(
    opening=beat(
        """
        on {day} {name} asked {friend} about training.
        {friend} explains it to {name}, who has trained for {hours} hours.
        a note from {name}'s notebook, page {page}.
        {name} and {friend} train a model of {m} million weights.
        {name} read this on {day} and sent it to {friend}.
        after {hours} hours of work {name} wrote down what had helped.
        """
    ),
    ideas=plots(
        """
        a checkpoint is a saved state of the training.
        a checkpoint is what a run leaves on the disk so that it can go on.

        it holds the weights, the state of the optimizer and the number of the step.
        without the state of the optimizer it would be only half a checkpoint.

        {name}'s run saved one every {k} steps.
        with a checkpoint every {k} steps, a crash at step {step} costs at most {k} steps.

        when the machine stopped at step {step}, it continued from step {kept}.
        after a stop at step {step} the last good one was step {kept}.

        a checkpoint that was not written to its end must not be used.
        a checkpoint counts only when it has been read back.
        -
        ===
        the learning rate is the size of a step.
        how far the weights move in one step is set by the learning rate.

        too large, and the loss jumps; too small, and nothing happens for hours.
        with {lr} the loss fell, with ten times as much it jumped.

        at the start it rises over {warm} steps, which is called warmup.
        a warmup of {warm} steps protects a model that knows nothing yet.

        then it falls until the end, so that the last steps are small.
        after that it follows a curve down to nearly nothing.

        {name} tried three values and kept {lr}.
        for a model of {m} million weights {lr} was a good value.
        -
        ===
        a gradient says for every weight in which direction the loss grows.
        the gradient is a list of slopes, one for every weight.

        the optimizer moves against it.
        so a step goes the other way, downhill.

        it is computed from a batch of {batch} examples.
        with {batch} examples in a batch it is noisy, with more it is steadier.

        if it becomes very long, it is cut to a fixed length; that is called clipping.
        several small batches can be added up before one step is made.

        {name} compares it to walking down a hill in fog.
        -
        ===
        the loss is a number that says how surprised the model is.
        a model that guesses among {vocab} tokens has a loss of about {guess}.

        at step {kept} {name} saw {loss}.
        it began high and was {loss} at step {step}.

        a falling loss on the training data alone proves nothing.
        what counts is the loss on text that the model has not seen.

        when the two part ways, the model learns by heart; that is overfitting.
        if only one of them falls, more data helps more than more steps.
        ===
        a token is a small piece of text.
        models do not read letters but tokens.
        before training, text is cut into tokens.

        a tokenizer with {vocab} pieces was learned from the text itself.
        with {vocab} pieces, a page has about {page} tokens.

        frequent words are one token, rare ones several.
        digits are kept apart, so that sums can be learned.

        the cut must be the same in training and afterwards.
        {name} once used another tokenizer for the answers and got nonsense.
        -
        ===
        an adapter is a small set of weights beside a frozen model.
        instead of all weights, one can train an adapter.

        it needs a fraction of the memory.
        of {m} million weights it trains less than one in a hundred.

        so {name} could train on a card with {gb} gigabytes.
        that is why a card with {gb} gigabytes was enough.

        afterwards it can be merged into the model or kept apart.
        several adapters may share one model.
        """
    ),
    journeys=plots(
        """
        {name} has a laptop and no large card.
        {name} wanted a model of {m} million weights but owned only a laptop.

        first came `sojourn plan`: it told memory, hours and money before anything was paid.
        `sojourn plan` said that {gb} gigabytes and {hours} hours would do, for {price} coins.

        then `sojourn prepare` made tokens out of the text, at home, where the meter does not run.
        the data was prepared at home with `sojourn prepare`.

        `sojourn rehearse` took one minute and tried the longest batch.
        a rehearsal of one minute showed that the run would go through.

        `sojourn train` ran for {hours} hours.
        on {day} `sojourn train` was started.

        at step {step} the connection broke; the same command continued from step {kept}.
        the machine was taken away at step {step}. On another one the run went on from step {kept}.

        in the end the model came home and answered questions.
        the budget of {price} coins was not passed.
        -
        ===
        Sojourn means a short stay.
        a sojourn is a short stay, and so is a rented computer.

        the program trains and serves language models on cards that one rents by the hour.
        it was made for people who rent a card for {hours} hours and not for a year.

        every run can be killed at any instant.
        a run that is stopped loses nothing that was saved.

        calling `sojourn train` again continues it, bit for bit.
        the second call of `sojourn train` continues where the first one ended.

        a limit of {price} coins is kept even when the laptop is closed.
        with a budget of {price} coins it saves, copies and stops by itself.

        `sojourn doctor` says what is wrong with a machine.
        `sojourn export` turns the result into a file that other programs open.
        `sojourn board` shows the curves in the browser.
        ===
        {name} asked why the card was not rented first.
        "Why not rent the card at once?" asked {name}.

        because the meter runs while data is downloaded.
        because {hours} hours of waiting cost as much as {hours} hours of training.

        so the work for the processor comes first and the card comes last.
        what can be done at home is done at home.

        memory is planned: weights, gradients, optimizer, activations.
        for {m} million weights the plan listed weights, gradients, optimizer and activations.

        a batch of {batch} rows did not fit, so it was split into parts; the result is the same.
        when memory is short, the batch is split and the sum stays the same.

        that is how {price} coins were enough.
        on {day} the bill was {price} coins.
        -
        """
    ),
    ending=beat(
        """
        -
        -
        {friend} agreed.
        {friend} will try it on {day}.
        that is all one has to know for the first {hours} hours.
        """
    ),
)
