"""What is tried on real models: ``make models`` fetches them, ``make test-real`` runs the tests here, ``make bench-real`` measures.

    models   which models, from where, and where they lie     fetch     `python -m tests.real.fetch`: gets them there
    hf_form  a GGUF file as a Hugging Face folder             golden    what transformers says of them: `make golden-real`
    bench    `python -m tests.real.bench`                     test_*    marked `real`

Nothing of a model is in the repository, and no test downloads: without the models the tests are skipped.
"""
