"""Cases that take long, and of which a neighbour stays that takes the same way: they run before a release, as what is marked so where it stands

File -> name of a test, or of one of its cases, a line each; `*` is anything"""

cases = {
'capture/test_compiled.py': '''
    test_in_place_and_views[inductor]
    test_two_calls_with_one_tensor[inductor]
    test_leaves_keep_no_hooks[inductor]
    test_autocast
    test_compiled_autograd[eager-*
    test_checkpointing[True-blocks]
    test_checkpointing[False-whole]
    test_schedules[blocks-te.step]
    test_schedules[whole-optimizer]
    ''',
'capture/test_activations.py': '''
    test_compiled[inductor-*
    test_compiled[aot_eager-in place-*
    test_beside_an_ember[inductor-*
    test_beside_an_ember[aot_eager-blocks-*
    test_twelve_kinds_of_blocks
    ''',
'capture/test_compiled_models.py': '''
    test_inductor[cells]
    test_inductor[routed]
    test_in_one_graph[llama]
    test_in_one_graph[vit]
    test_in_one_graph[encoder]
    test_in_one_graph[resnet]
    test_in_several[tagger]
    ''',
'capture/test_hearing.py': '''
    test_each_is_told_what_it_is_told_alone[blocks-monitor-activations]
    test_each_is_told_what_it_is_told_alone[blocks-their gradients-ember]
    test_each_is_told_what_it_is_told_alone[whole-their gradients-*
    test_a_graph_is_made_for_what_is_wanted_and_not_for_who_wants_it[blocks]
    test_one_who_comes_in_the_middle_of_a_pass_hears_the_next_one_whole[whole]
    ''',
'devices/test_late_device.py': '''
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-plain-all-one by one]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-plain-all-fused]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-*-all-foreach]
    test_a_layer_that_is_called_on_two_streams_in_turn[operations-*
    test_a_loss_that_was_scaled[operations-one step skipped-*
    ''',
'devices/test_late_graphs.py': '''
    test_the_numbers_are_those_of_the_cpu[operations-*-as it comes]
    test_the_numbers_are_those_of_the_cpu[operations-*-every third]
    test_an_optimizer_of_its_own_kind[operations]
    test_several_replays_in_a_step[operations-*
    test_replayed_on_another_stream_each_time[operations-*
    test_nothing_grows[operations-*
    test_graphs_in_turns_and_passes_between[operations]
    test_a_function_of_the_users[operations]
    test_statistics_that_are_changed_after_the_capture[operations]
    ''',
'health/test_diff.py': '''
    test_compiled_is_the_same_as_eager[inductor]
    ''',
'jaxember/test_jaxember.py': '''
    test_numbers_and_rows[normed]
    test_numbers_and_rows[branched]
    test_numbers_and_rows[recurrent]
    test_numbers_and_rows[bfloat16]
    test_memory_is_flat
    test_their_notebook
    ''',
'jaxember/test_jax_summaries.py': '''
    test_elsewhere[1]
    ''',
'jaxember/test_jax_cases.py': '''
    test_scanned_layers_that_run_twice
    test_two_models[one step]
    test_what_a_loop_gives_that_is_no_part_of_it[False-True]
    ''',
'jaxember/test_jax_processes.py': '''
    test_two_devices_in_each_of_two_processes
    ''',
'recorder/test_black_box.py': '''
    test_killed_at_any_moment[2-loader]
    test_killed_at_any_moment[2-compiled]
    ''',
'frameworks/test_reduce.py': '''
    test_told_is_what_is_read[4-*
    test_told_is_what_is_read[2-*
    ''',
'sinks/test_sinks.py': '''
    test_a_process_that_ends_without_close_tells_the_last_step
    ''',
'sinks/test_wandb_offline.py': '''
    test_a_run_that_the_user_opens_later_is_theirs[finish_previous]
    test_rows_of_the_users_have_no_older_numbers_under_a_newer_step
    test_visualization_opens_a_run_where_there_is_none
    ''',
'show/test_interactive.py': '''
    test_live
    ''',
'show/test_show.py': '''
    test_each_picture_of_an_ember_a_tracker_and_a_table[dark_background-*
    ''',
'show/test_ranks_shown.py': '''
    test_every_picture_takes_its_name
    ''',
'board/test_board_in_browser.py': '''
    test_it_is_there_again_when_the_server_is
    ''',
'board/test_board_server.py': '''
    test_a_training_that_is_killed_leaves_its_last_words
    test_a_page_is_made_when_a_share_of_the_time_has_gone
    ''',
'store/test_rotation.py': '''
    test_who_is_killed_at_any_call_that_touches_the_disk[joined]
    ''',
'store/test_compact.py': '''
    test_answers_are_those_of_the_lines[over]
    test_who_compacts_may_be_killed[over]
    ''',
'store/test_log_faults.py': '''
    test_ends[error]
    ''',
'frames/test_moving.py': '''
    test_connections_that_end_in_the_middle_of_an_upload
    test_two_processes_bring_a_run_at_once
    ''',
'ground/test_readme.py': '''
    test_alone[*
    ''',
'ground/test_process.py': '''
    test_the_test_that_left_something_fail
    ''',
'measure/test_numbers.py': '''
    test_fuzz_threads[torch]
    test_fuzz[torch-1]
    test_fuzz[torch-2]
    test_fuzz[torch-3]
    test_fuzz[loops-2]
    test_fuzz[loops-3]
    ''',
'measure/test_loading.py': '''
    test_exit_meanwhile[0-True]
    ''',
'run/test_run.py': '''
    test_its_end_is_its_own[sys.exit('why')]
    test_its_end_is_its_own[raise KeyboardInterrupt]
    test_its_end_is_its_own[os._exit(4)]
    ''',
}
