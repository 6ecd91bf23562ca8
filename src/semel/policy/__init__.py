"""The policy file: what topics promise, how consumers keep it, and the real guarantee.

    text ──▶ Policy ──▶ Effective ──▶ Guarantee ──▶ findings ──▶ answers
             model      model         guarantee     rules        questions
                                                    └─── lint ───┘

`reader` reads the YAML, `sections` has the keys of the file, `vocabulary` the words that
they take, `spark` the rules for consumers that a pipeline runs, and `effective` says where each
value comes from.  This package imports none of
them: the engine takes its enums from `semel.policy.vocabulary`, and needs neither pydantic
nor YAML for them.
"""
